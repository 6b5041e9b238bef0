# Types whose objects the compiled half alone makes: an object that nobody has filled in would be used like one that is.
cdef extern from *:
    """
    static PyObject *fc_no_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
        (void)args; (void)kwargs;
        return PyErr_Format(PyExc_TypeError, "%.200s: only the calls of a store make one", type->tp_name);
    }
    /* the module that defines the type makes its objects without the slot, and so goes on to */
    static CYTHON_INLINE void fc_seal(PyObject *type) {
        ((PyTypeObject *)type)->tp_new = fc_no_new;
        ((PyTypeObject *)type)->tp_vectorcall = NULL;
    }
    """
    # From Python, X() and X.__new__(X) are a TypeError from now on.
    void seal "fc_seal" (object type) noexcept
