NAMES: tuple[str, ...]
STATES: tuple[str, ...]
MODES: dict[str, int]
RESERVED: dict[str, int]
MOST: int
