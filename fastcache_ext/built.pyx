"""How the compiled half was built: what setup.py told the compiler, which says it again. Every module was built alike.

May import nothing.
"""
cdef extern from *:
    """
    #ifndef FC_BUILD_KIND
    #error "setup.py says what kind of build it is"
    #endif
    #ifdef __clang__
    #define FC_COMPILER __VERSION__
    #else
    #define FC_COMPILER "GCC " __VERSION__
    #endif
    """
    const char *FC_BUILD_KIND
    const char *FC_BUILD_FLAGS
    const char *FC_COMPILER

KIND = FC_BUILD_KIND.decode()           # "release", or what FASTCACHE_BUILD named: quick, debug, asan, tsan
FLAGS = FC_BUILD_FLAGS.decode()         # of the compiler, without those for warnings
COMPILER = FC_COMPILER.decode()
