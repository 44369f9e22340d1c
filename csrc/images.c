/* images.c — the hashes that setup.py took when it compiled the worker and the launcher. */
#include "images.h"

#include <stddef.h>
#include <string.h>

#include "image_hash.h" /* made by `setup.py build_worker` */

static const struct {
	const char *program, *arch, *hash;
} images[] = {VJ_IMAGE_HASHES};

const char *vj_image_hash(const char *program, const char *arch)
{
	for (size_t i = 0; images[i].program; i++)
		if (!strcmp(images[i].program, program) && !strcmp(images[i].arch, arch))
			return images[i].hash;
	return NULL;
}
