/*
 * The tap: a third reader of all messages that an instance sends and receives, as copies. There is room for a third of the
 * buffers of each pool; what comes beyond that goes on its way, and is counted. Nothing of it over UDP.
 */
#ifndef NV_IPC_FORWARD_H_INCLUDED_
#define NV_IPC_FORWARD_H_INCLUDED_

#include <time.h>

#include "nv_ipc.h"

#if defined(__cplusplus)
extern "C" {
#endif

/*
 * Starts it: for count messages, or with 0 for all that come. -1 if it is started. Of the messages, those whose bytes in
 * nv_ipc_get_primary_config(ipc)->debug_configs.msg_filter and .cell_filter are not 0 now; a filter of zeros means all.
 */
int nvipc_fw_start(nv_ipc_t *ipc, uint32_t count);
/* Stops it. What is in it can be read. */
int nvipc_fw_stop(nv_ipc_t *ipc);
/* As nvipc_fw_stop, and counts from 0 again. */
int nvipc_fw_reset(nv_ipc_t *ipc);
/* 1 while it is started, else 0. */
int nvipc_fw_get_started(nv_ipc_t *ipc);
/* Messages for which there was no room. */
uint32_t nvipc_fw_get_lost(nv_ipc_t *ipc);

/* Wait until there is a message to read; the first not longer than a time of CLOCK_REALTIME, and then it is -1 with ETIMEDOUT. */
int nvipc_fw_sem_timedwait(nv_ipc_t *ipc, const struct timespec *ts_abs);
int nvipc_fw_sem_wait(nv_ipc_t *ipc);

/* Takes the oldest message; -1 if there is none. Its buffers are the reader's until they are freed, or the instance destroyed. */
int nvipc_fw_dequeue(nv_ipc_t *ipc, nv_ipc_msg_t *msg);
int nvipc_fw_free(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* Puts a message that the caller has allocated or received into it, as sending it would. */
int nvipc_fw_enqueue(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

#if defined(__cplusplus)
}
#endif

#endif
