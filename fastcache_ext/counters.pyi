NAMES: tuple[str, ...]
ERRORS: tuple[str, ...]
LAYER_NAMES: tuple[str, ...]
PHASES: tuple[str, ...]
WAIT_BUCKETS: int
