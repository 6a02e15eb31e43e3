/* For GPU memory, use the four copy functions of nv_ipc_t, and cuda_is_device_pointer. */
#ifndef NV_IPC_CUDA_UTILS_H_INCLUDED_
#define NV_IPC_CUDA_UTILS_H_INCLUDED_

#include "nv_ipc_utils.h"

#endif
