import type { Kernel } from '@jupyterlab/services';

/**
 * Call a function with each kernel of some that runs no more, once the server's
 * list of kernels lacks it: of a shutdown no event tells.
 *
 * @param kernels - the page's copy of that list
 * @param known - the ids of kernels that something is kept of
 * @param ended - called with the id of each that is not in the list
 */
export function onEnded(
  kernels: Kernel.IManager,
  known: () => Iterable<string>,
  ended: (kernelId: string) => void
): void {
  kernels.runningChanged.connect((_, models) => {
    const running = new Set(models.map(model => model.id));
    // What is kept is changed meanwhile.
    [...known()].filter(id => !running.has(id)).forEach(ended);
  });
}
