#define MP_STACK_CHECK()
