#define PF_ISA avx2
#include "elementwise_impl.h"
