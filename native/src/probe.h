/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_PROBE_H
#define KC_PROBE_H
int probe_command(void);
#endif
