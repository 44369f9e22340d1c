/* channel.h — the hot path of the host: one request on one lane, its output, its reply.
 *
 * A lane is a connected SOCK_SEQPACKET socket to a worker. It carries one request at a time and its reply comes back
 * on it, so a caller needs neither a demultiplexer nor a lock while it waits, and a dead worker is end-of-file.
 * All functions return 0 or a positive value on success and a negative errno on failure; none needs the GIL, none
 * prints, none allocates by a length that the worker sent.
 */
#ifndef VJ_CHANNEL_H
#define VJ_CHANNEL_H

#include <stddef.h>
#include <stdint.h>

#include "plain.h"

#define VJ_REPLY_MAX (64u * 1024)
#define VJ_FDS_MAX 4

/* What vj_call_wait and vj_call_step answer. */
#define VJ_PENDING 0    /* nothing new within the time given */
#define VJ_DONE 1       /* the reply is in call->reply, all output has been read */
#define VJ_DATA 2       /* VJ_STREAM only: output is waiting in call->out */
#define VJ_NEED_INPUT 3 /* VJ_FEED only: everything given to vj_call_feed has been written */

/* Flags of vj_exec. */
#define VJ_CAPTURE_OUT 1u /* make a pipe for the command's stdout and collect it */
#define VJ_CAPTURE_ERR 2u
#define VJ_MERGE 4u       /* stderr goes into the stdout pipe */
#define VJ_STREAM 8u      /* report output as it comes instead of collecting it to the end */
#define VJ_FEED 16u       /* stdin is a pipe that vj_call_feed fills */

/* Bytes kept of one stream: everything up to `cap`, beyond it the first and the last half of `cap`. */
struct vj_stream {
	uint8_t *data;
	size_t len;       /* bytes in use */
	size_t size;      /* bytes allocated */
	size_t next;      /* ring position, only when `dropped` > 0 */
	uint64_t dropped; /* bytes that were read and not kept */
};

struct vj_call {
	int lane;         /* owned by Python */
	int epoll;        /* lane and pipes as one descriptor for an event loop, −1 until asked for */
	unsigned flags;
	int read_end[2];  /* our ends of the command's stdout and stderr, −1 = none */
	int write_end[2]; /* kept until the reply, so that a command that closes its output does not wake us */
	int stdin_end;    /* where vj_call_feed writes, −1 = none */
	int stdin_last;   /* no more input will come: close after the rest is written */
	uint8_t *input;
	size_t input_len, input_at;
	size_t cap;
	struct vj_stream out[2];
	uint8_t *reply;   /* VJ_REPLY_MAX bytes, allocated on first use */
	size_t reply_len;
	int reply_fd;     /* a descriptor that came with the reply, −1 = none; the caller closes it */
	int busy;         /* a request is under way */
	int plain;        /* the reply is the common one of a command, its numbers are in `numbers` (plain.h) */
	int64_t numbers[VJ_PLAIN_N];
	int patience_ms;  /* how long the reply is awaited alone before the pipes are looked at */
};

/* Prepare a zeroed structure for `lane`. */
void vj_call_init(struct vj_call *c, int lane);
/* Free everything but the lane's descriptor. */
void vj_call_clear(struct vj_call *c);

/* Send an exec-like request (exec, spawn, terminal) with the command's descriptors. fds: stdin, stdout, stderr and
 * one more; −1 means /dev/null for stdin, and for stdout/stderr a pipe of ours when the flag asks for one, else
 * /dev/null; extra −1 = none. owner_uid ≥ 0: the pipes are given to that user (a jail of another uid reopens
 * /dev/stdout by name). */
int vj_exec(struct vj_call *c, const uint8_t *request, size_t len, const int fds[4], unsigned flags, size_t cap,
            int64_t owner_uid, int64_t owner_gid);

/* vj_exec and the first vj_call_wait in one, for callers that block. A request that could not be sent leaves call->busy
 * 0, an error after that leaves it 1: the command may have run. */
int vj_run(struct vj_call *c, const uint8_t *request, size_t len, const int fds[4], unsigned flags, size_t cap,
           int64_t owner_uid, int64_t owner_gid, int64_t timeout_ms);

/* Wait up to timeout_ms (−1: for ever). VJ_*; −EINTR after a signal; −EPIPE when the worker has gone. */
int vj_call_wait(struct vj_call *c, int64_t timeout_ms);
/* The same without waiting, for an event loop that watches vj_call_pollfd(). */
int vj_call_step(struct vj_call *c);
int vj_call_pollfd(struct vj_call *c);

/* Hand over input for stdin (copied). last: no more will come. */
int vj_call_feed(struct vj_call *c, const uint8_t *data, size_t len, int last);
/* Forget the collected output of stream 0 or 1 (VJ_STREAM, after the caller copied it). */
void vj_call_drop(struct vj_call *c, int which);

/* A request without command: send it, with up to VJ_FDS_MAX descriptors, and wait for the reply as vj_call_wait. */
int vj_request(struct vj_call *c, const uint8_t *request, size_t len, const int *fds, size_t nfds, int64_t timeout_ms);
/* Only send. */
int vj_post(struct vj_call *c, const uint8_t *request, size_t len, const int *fds, size_t nfds);

#endif
