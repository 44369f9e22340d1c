/* shim.h — the functions that Python may call; each is declared, with its contract, in the header named here. */
#ifndef VJ_SHIM_H
#define VJ_SHIM_H

#include "channel.h"
#include "core/start.h"
#include "core/treecall.h"
#include "core/treewatch.h"
#include "images.h"
#include "plain.h"
#include "seen.h"

#endif
