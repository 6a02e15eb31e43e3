/*
 * The tap: a third reader that gets copies of all messages that an instance sends and receives. It has room for a third of
 * the buffers of each pool, and for 64 MiB; further messages are sent normally, and counted as lost. Not available over
 * UDP.
 */
#ifndef NV_IPC_FORWARD_H_INCLUDED_
#define NV_IPC_FORWARD_H_INCLUDED_

#include <time.h>

#include "nv_ipc.h"

#if defined(__cplusplus)
extern "C" {
#endif

/*
 * Starts the tap for count messages, or for all messages if count is 0. -1 if it is started already. Messages pass whose
 * ids have a byte other than 0 in nv_ipc_get_primary_config(ipc)->debug_configs.msg_filter and .cell_filter at this time; a
 * filter of zeros passes all.
 */
int nvipc_fw_start(nv_ipc_t *ipc, uint32_t count);
/* Stops the tap. Messages in it can still be read. */
int nvipc_fw_stop(nv_ipc_t *ipc);
/* As nvipc_fw_stop, and resets the count of lost messages. */
int nvipc_fw_reset(nv_ipc_t *ipc);
/* 1 while the tap is started, else 0. */
int nvipc_fw_get_started(nv_ipc_t *ipc);
/* Number of messages for which there was no room. */
uint32_t nvipc_fw_get_lost(nv_ipc_t *ipc);

/* Both wait until there is a message to read. The first waits until a time of CLOCK_REALTIME, then returns -1 with errno
 * ETIMEDOUT. */
int nvipc_fw_sem_timedwait(nv_ipc_t *ipc, const struct timespec *ts_abs);
int nvipc_fw_sem_wait(nv_ipc_t *ipc);

/* Takes the oldest message; -1 if there is none. The reader owns its buffers until they are freed or the instance is
 * destroyed. */
int nvipc_fw_dequeue(nv_ipc_t *ipc, nv_ipc_msg_t *msg);
int nvipc_fw_free(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

/* Copies a message that the caller has allocated or received into the tap, as sending it would. */
int nvipc_fw_enqueue(nv_ipc_t *ipc, nv_ipc_msg_t *msg);

#if defined(__cplusplus)
}
#endif

#endif
