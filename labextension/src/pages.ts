import type { ISessionContext } from '@jupyterlab/apputils';
import type { Cell, CodeCell } from '@jupyterlab/cells';
import type { ConsolePanel, IConsoleTracker } from '@jupyterlab/console';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { Session } from '@jupyterlab/services';

/** A notebook or console that is open. */
export interface IKernelPage {
  readonly sessionContext: ISessionContext;
  readonly cells: Iterable<Cell>;
  /** Run cells of it, as its user would. */
  run(cells: readonly CodeCell[]): Promise<void>;
}

/** The open notebooks and consoles, by what they show. */
export class KernelPages {
  /** @param consoles - `null` where the application has no consoles */
  constructor(
    private readonly _notebooks: INotebookTracker,
    private readonly _consoles: IConsoleTracker | null
  ) {}

  /** The pages that a kernel runs. */
  ofKernel(kernelId: string): IKernelPage[] {
    return this._filter(context => context.session?.kernel?.id === kernelId);
  }

  /** The open notebooks that a kernel runs. */
  notebooks(kernelId: string): NotebookPanel[] {
    return this._notebooks.filter(
      panel => panel.sessionContext.session?.kernel?.id === kernelId
    );
  }

  /** The open views of a notebook, by the session that they share. */
  notebooksOf(context: ISessionContext): NotebookPanel[] {
    return this._notebooks.filter(panel => panel.sessionContext === context);
  }

  /** The pages of a notebook or console. */
  ofPath(path: string | null): IKernelPage[] {
    return path ? this._filter(context => context.path === path) : [];
  }

  /** Call a function with the session of each page, now and later ones. */
  forEachContext(callback: (context: ISessionContext) => void): void {
    for (const tracker of [this._notebooks, this._consoles]) {
      tracker?.forEach(({ sessionContext }) => callback(sessionContext));
      tracker?.widgetAdded.connect((_, { sessionContext }) =>
        callback(sessionContext)
      );
    }
  }

  private _filter(test: (context: ISessionContext) => boolean): IKernelPage[] {
    const chosen = (panel: NotebookPanel | ConsolePanel) =>
      test(panel.sessionContext);
    return [
      ...this._notebooks.filter(chosen).map(panel => ({
        sessionContext: panel.sessionContext,
        cells: panel.content.widgets,
        run: async (cells: readonly CodeCell[]) => {
          await NotebookActions.runCells(
            panel.content,
            cells,
            panel.sessionContext
          );
        }
      })),
      ...(this._consoles?.filter(chosen) ?? []).map(panel => ({
        sessionContext: panel.sessionContext,
        cells: panel.console.cells,
        run: async (cells: readonly CodeCell[]) => {
          // What was entered into a console is entered once more.
          for (const cell of cells) {
            await panel.console.inject(cell.model.sharedModel.getSource());
          }
        }
      }))
    ];
  }
}

/**
 * Attach the open pages of a notebook or console to a kernel that was restored
 * for it.
 *
 * @returns whether there is such a page
 */
export async function attachPages(
  pages: KernelPages,
  sessions: Session.IManager,
  path: string | null,
  kernelId: string
): Promise<boolean> {
  // Pages whose session the server moved to the kernel follow by themselves,
  // and connections to sessions of an earlier server are closed.
  await sessions.refreshRunning();
  const found = pages.ofPath(path);
  for (const page of found) {
    await attach(page.sessionContext, sessions, kernelId);
  }
  return found.length > 0;
}

/**
 * Give pages that lost their kernel with its server the one that the new server
 * has restored for them, without anybody having asked this page.
 *
 * @param isRestored - whether a kernel came out of a saved state
 */
export async function adoptRestored(
  pages: KernelPages,
  sessions: Session.IManager,
  isRestored: (kernelId: string) => Promise<boolean>
): Promise<void> {
  // Connections to sessions of an earlier server are closed by this.
  await sessions.refreshRunning();
  for (const { path, kernel } of [...sessions.running()]) {
    const left = pages
      .ofPath(path)
      .filter(({ sessionContext }) => !sessionContext.session);
    if (kernel && left.length > 0 && (await isRestored(kernel.id))) {
      for (const { sessionContext } of left) {
        await attach(sessionContext, sessions, kernel.id);
      }
    }
  }
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
  // kernel up for dead. The server has a session for the page: taking that one
  // avoids a second session beside it. There is no public way: changeKernel()
  // makes a session under a new name and renames it, and initialize(), which
  // takes the server's, does so only once.
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
 * Ask a restored kernel how it is: what the pages last heard was said by the
 * kernel that died.
 */
export function refreshStatus(pages: IKernelPage[]): void {
  for (const page of pages) {
    page.sessionContext.session?.kernel?.requestKernelInfo().catch(() => {
      // The connection closed: its next one asks by itself.
    });
  }
}
