/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_RESTORE_H
#define KC_RESTORE_H
#include "args.h"
int restore_command(const struct args *args);
#endif
