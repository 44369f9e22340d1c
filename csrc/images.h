/* images.h — which bytes the programs of this build have. */
#ifndef VJ_IMAGES_H
#define VJ_IMAGES_H

/* SHA-256 in hex of `program` ("worker", "launcher") for `arch` ("x86_64", "aarch64"); NULL: not in this build. */
const char *vj_image_hash(const char *program, const char *arch);

#endif
