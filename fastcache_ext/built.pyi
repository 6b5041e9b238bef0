KIND: str
FLAGS: str
COMPILER: str
