/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "pidslot.h"

int main(void)
{
    uint64_t state = 1812433253;
    static const long limits[] = {1024, 32768, 99999, 4194304};
    for (size_t k = 0; k < sizeof(limits) / sizeof(limits[0]); k++) {
        pid_t least = (pid_t)limits[k];
        pid_t most = 0;
        for (int i = 0; i < 20000; i++) {
            pid_t slot = pidslot_random(limits[k], check_random(&state));
            CHECK(slot >= limits[k] / 4 && slot < limits[k] / 10 * 9);
            least = slot < least ? slot : least;
            most = slot > most ? slot : most;
        }
        CHECK(most - least > limits[k] / 2); /* all of the range is used */
    }
    return 0;
}
