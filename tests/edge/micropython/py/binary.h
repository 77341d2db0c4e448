#include "py/runtime.h"
size_t mp_binary_get_size(char, char, size_t *);
mp_obj_t mp_binary_get_val_array(char, void *, size_t);
void mp_binary_set_val_array(char, void *, size_t, mp_obj_t);
