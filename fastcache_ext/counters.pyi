NAMES: tuple[str, ...]
LAYER_NAMES: tuple[str, ...]
