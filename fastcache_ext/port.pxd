# What engines see of the monitor.
from fastcache_ext.ioqueue cimport fc_port
from fastcache_ext.monitor cimport fc_core

cdef void core_port(fc_core *c, fc_port *port) noexcept nogil
