/* For programs that include this header of NVIPC. It gives no access to a link's internals: use `shmesh dump` and
 * `shmesh capture`. */
#ifndef NV_IPC_DEBUG_H_INCLUDED_
#define NV_IPC_DEBUG_H_INCLUDED_

#include "nv_ipc.h"
#include "nv_ipc_ring.h"
#include "nv_ipc_shm.h"
#include "stat_log.h"

#endif
