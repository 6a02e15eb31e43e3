/* NVIPC's tap. Links of shmesh have none: everything that would start or read one returns -1, at once. */
#ifndef NV_IPC_FORWARD_H_INCLUDED_
#define NV_IPC_FORWARD_H_INCLUDED_

#include <time.h>

#include "nv_ipc.h"

#if defined(__cplusplus)
extern "C" {
#endif

int nvipc_fw_start(nv_ipc_t *ipc, uint32_t count);
int nvipc_fw_sem_timedwait(nv_ipc_t *ipc, const struct timespec *ts_abs);
int nvipc_fw_sem_wait(nv_ipc_t *ipc);
int nvipc_fw_enqueue(nv_ipc_t *ipc, nv_ipc_msg_t *msg);
int nvipc_fw_dequeue(nv_ipc_t *ipc, nv_ipc_msg_t *msg);
int nvipc_fw_free(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* 0: nothing is started, and nothing lost. */
int nvipc_fw_stop(nv_ipc_t *ipc);
int nvipc_fw_reset(nv_ipc_t *ipc);
int nvipc_fw_get_started(nv_ipc_t *ipc);
uint32_t nvipc_fw_get_lost(nv_ipc_t *ipc);

#if defined(__cplusplus)
}
#endif

#endif
