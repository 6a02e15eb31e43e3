/* Memory of a GPU is reached through a link: see the four copies of nv_ipc_t, and cuda_is_device_pointer. */
#ifndef NV_IPC_CUDA_UTILS_H_INCLUDED_
#define NV_IPC_CUDA_UTILS_H_INCLUDED_

#include "nv_ipc_utils.h"

#endif
