/* shim.h — the functions that Python may call; each is declared, with its contract, in the header named here. */
#ifndef VJ_SHIM_H
#define VJ_SHIM_H

#include "core/start.h"
#include "images.h"
#if __has_include("core/treewatch.h")
#include "core/treewatch.h"
#endif
#if __has_include("channel.h")
#include "channel.h"
#endif

#endif
