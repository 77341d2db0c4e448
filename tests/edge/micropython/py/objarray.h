#include "py/runtime.h"
#define MP_OBJ_ARRAY_TYPECODE_FLAG_RW (0x80)
typedef struct { mp_obj_base_t base; size_t typecode : 8, free : 8 * sizeof(size_t) - 8, len; void *items; } mp_obj_array_t;
void mp_obj_memoryview_init(mp_obj_array_t *, size_t, size_t, size_t, void *);
