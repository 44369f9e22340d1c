/* stream.c — lanes without descriptors: frames and JSON lines on a byte stream. */
#include "worker.h"
void stream_send(struct lane *l, const struct mp_writer *w) {(void)l;(void)w;}
void stream_ready(struct lane *l, short r) {(void)r; lane_drop(l);}
