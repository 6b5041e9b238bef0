NAMES: dict[str, int]
