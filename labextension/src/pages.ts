import type { ISessionContext } from '@jupyterlab/apputils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { Session } from '@jupyterlab/services';

/** The open notebooks that a kernel runs. */
export function panelsOfKernel(
  tracker: INotebookTracker,
  kernelId: string
): NotebookPanel[] {
  return tracker.filter(
    panel => panel.sessionContext.session?.kernel?.id === kernelId
  );
}

/** The open pages of a notebook. */
export function panelsOfPath(
  tracker: INotebookTracker,
  path: string | null
): NotebookPanel[] {
  return path
    ? tracker.filter(panel => panel.sessionContext.path === path)
    : [];
}

/**
 * Attach the open pages of a notebook to a kernel that was restored for it.
 *
 * @returns whether there is such a page
 */
export async function attachPages(
  tracker: INotebookTracker,
  sessions: Session.IManager,
  path: string | null,
  kernelId: string
): Promise<boolean> {
  // Pages whose session the server moved to the kernel follow by themselves,
  // and connections to sessions of an earlier server are closed.
  await sessions.refreshRunning();
  const panels = panelsOfPath(tracker, path);
  for (const panel of panels) {
    await attach(panel.sessionContext, sessions, kernelId);
  }
  return panels.length > 0;
}

/** What SessionContext has, but does not declare. */
interface ISessionAdopter {
  _handleNewSession?: (session: Session.ISessionConnection) => unknown;
}

async function attach(
  context: ISessionContext,
  sessions: Session.IManager,
  kernelId: string
): Promise<void> {
  const kernel = context.session?.kernel;
  if (kernel?.id === kernelId && kernel.status !== 'dead') {
    return;
  }
  if (context.session && kernel?.id !== kernelId) {
    await context.changeKernel({ id: kernelId });
    return;
  }
  // The page lost its session with the server, or its connection gave the
  // kernel up for dead. The server has a session for the notebook: taking that
  // one avoids a second session beside it, which changeKernel would create.
  const adopter = context as unknown as ISessionAdopter;
  for (const model of sessions.running()) {
    if (
      model.path === context.path &&
      model.kernel?.id === kernelId &&
      adopter._handleNewSession
    ) {
      adopter._handleNewSession(sessions.connectTo({ model }));
      return;
    }
  }
  await context.changeKernel({ id: kernelId });
}

/**
 * Ask a restored kernel how it is: what the page last heard was said by the
 * kernel that died.
 */
export function refreshStatus(panels: NotebookPanel[]): void {
  for (const panel of panels) {
    panel.sessionContext.session?.kernel?.requestKernelInfo().catch(() => {
      // The connection closed: its next one asks by itself.
    });
  }
}
