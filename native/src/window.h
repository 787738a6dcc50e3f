/* SPDX-License-Identifier: BSD-3-Clause */
/* Whether anything in a stopped tree lies on this node only, so that the caller must copy it before
 * the tree runs on. */
#ifndef KC_WINDOW_H
#define KC_WINDOW_H

#include <stdbool.h>
#include <stddef.h>

#include "tree.h"

/* True when a process holds (fd, cwd, mapping, bound Unix socket) something below one of `dirs`, or
 * when CRIU left a link_remap.* file beside something deleted that a process holds. True also when
 * it cannot be told. */
bool window_needed(const struct tree *tree, const char *const *dirs, size_t count);

/* The parts that need no process, for tests. */
bool window_below(const char *path, const char *dir);
/* The path field of one line of /proc/PID/maps, or NULL. */
const char *window_maps_path(char *line);
/* The path field of one line of /proc/PID/net/unix, or NULL; the socket's inode. */
const char *window_unix_path(char *line, unsigned long *inode);

#endif
