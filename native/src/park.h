/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_PARK_H
#define KC_PARK_H
#include "args.h"
/* `park` and `unpark`. */
int park_command(const struct args *args);
#endif
