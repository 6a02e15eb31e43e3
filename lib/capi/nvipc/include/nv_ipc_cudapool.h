/* Device pools belong to a link: see nv_ipc.h. */
#ifndef NV_IPC_CUDAPOOL_H_INCLUDED_
#define NV_IPC_CUDAPOOL_H_INCLUDED_

#include "nv_ipc_mempool.h"

#endif
