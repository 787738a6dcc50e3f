import type { CodeCell } from '@jupyterlab/cells';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IRestoredFrom } from './api';
import { formatTime } from './format';
import type { History, IRanCell } from './gap';
import { undoneCells } from './gap';
import type { KernelStates } from './model';
import type { Notices } from './notices';
import type { KernelPages } from './pages';

/** The class of a cell that the kernel knows nothing of. */
const UNDONE_CLASS = 'jp-gpu-ckpt-undone';

/** How long a kernel has to say what it has executed, in milliseconds. */
const HISTORY_TIMEOUT = 2000;

/** Where it is remembered which gaps were dismissed, and how many of them. */
const DISMISSED = 'jupyter-gpu-ckpt:dismissed-gaps';
const REMEMBERED = 50;

/** A code cell of an open notebook. */
interface IOpenCell extends IRanCell {
  cell: CodeCell;
}

/**
 * Shows in open notebooks where their kernel went back in time: which cells
 * ran after the state was saved that it was restored from.
 */
export class Gaps {
  constructor(private readonly _options: Gaps.IOptions) {
    const { model, pages } = _options;
    model.changed.connect((_, kernelId) => this._onChanged(kernelId));
    model.kernelEvent.connect((_, event) => {
      if (event.action === 'restored') {
        void model.refresh(event.kernel_id);
      }
    });
    pages.forEachContext(context => {
      context.statusChanged.connect((_, status) => {
        const kernelId = context.session?.kernel?.id;
        if (kernelId && status.endsWith('restarting')) {
          this._clear(kernelId);
        }
      });
    });
  }

  private _onChanged(kernelId: string): void {
    const { model, pages } = this._options;
    const from = model.entry(kernelId).kernel?.restored_from;
    if (!from) {
      return;
    }
    for (const panel of pages.notebooks(kernelId)) {
      // A panel is looked at once for each restore, however often it is told.
      if (this._seen.get(panel) !== from.restored) {
        this._seen.set(panel, from.restored);
        void this._look(panel, kernelId, from);
      }
    }
  }

  /** Find and mark what the kernel does not have of a notebook. */
  private async _look(
    panel: NotebookPanel,
    kernelId: string,
    from: IRestoredFrom
  ): Promise<void> {
    await panel.context.ready;
    if (isDismissed(kernelId, from)) {
      return;
    }
    const kernel = panel.sessionContext.session?.kernel;
    if (!kernel || undoneCells(codeCells(panel), from, null).length === 0) {
      return;
    }
    const asked = askHistory(kernel, (from.execution_count ?? 0) + 1);
    const show = (history: History | null) => {
      if (!panel.isDisposed && this._seen.get(panel) === from.restored) {
        const cells = undoneCells(codeCells(panel), from, history);
        this._show(new Gap(panel, kernelId, from, cells, this._options));
      }
    };
    const inTime = await Promise.race([asked, timeOut(HISTORY_TIMEOUT)]);
    show(inTime ?? null);
    if (inTime === undefined) {
      // A kernel in the middle of a cell answers later.
      const late = await asked;
      if (late && this._gaps.get(panel)) {
        show(late);
      }
    }
  }

  private _show(gap: Gap): void {
    this._gaps.get(gap.panel)?.dispose();
    this._gaps.set(gap.panel, gap);
    gap.show();
  }

  private _clear(kernelId: string): void {
    for (const panel of this._options.pages.notebooks(kernelId)) {
      this._gaps.get(panel)?.dispose();
      this._gaps.delete(panel);
    }
  }

  private _gaps = new WeakMap<NotebookPanel, Gap>();
  private _seen = new WeakMap<NotebookPanel, string>();
}

export namespace Gaps {
  export interface IOptions {
    model: KernelStates;
    notices: Notices;
    pages: KernelPages;
    trans: TranslationBundle;
  }
}

/** The marked cells of one notebook, and the notice about them. */
class Gap {
  constructor(
    readonly panel: NotebookPanel,
    private readonly _kernelId: string,
    private readonly _from: IRestoredFrom,
    cells: IOpenCell[],
    private readonly _options: Pick<Gaps.IOptions, 'notices' | 'trans'>
  ) {
    this._marks = cells.map(({ cell }) => new Mark(cell, this._text()));
  }

  show(): void {
    for (const mark of this._marks) {
      mark.show(() => {
        this._marks = this._marks.filter(other => other !== mark);
        this._tell(false);
      });
    }
    this._tell(true);
  }

  dispose(): void {
    this._marks.forEach(mark => mark.dispose());
    this._marks = [];
    this._tell(false);
  }

  private _tell(isNew: boolean): void {
    const { notices, trans } = this._options;
    const count = this._marks.length;
    if (count === 0) {
      notices.gapClosed(this._kernelId);
      return;
    }
    const time = formatTime(this._from.created);
    notices.gap(
      this._kernelId,
      trans._n(
        'Kernel went back to %2: one cell ran after that.',
        'Kernel went back to %2: %1 cells ran after that.',
        count,
        time
      ),
      {
        runAgain: () => void this._runAgain(),
        dismiss: () => {
          rememberDismissed(this._kernelId, this._from);
          this.dispose();
        }
      },
      isNew
    );
  }

  /** In the order in which they ran; the marks go as they run. */
  private async _runAgain(): Promise<void> {
    const { content, sessionContext } = this.panel;
    const cells = this._marks
      .map(mark => mark.cell)
      .filter(cell => !cell.isDisposed);
    await NotebookActions.runCells(content, cells, sessionContext);
  }

  private _text(): string {
    return this._options.trans.__(
      'Undone: ran after the kernel was saved at %1',
      formatTime(this._from.created)
    );
  }

  private _marks: Mark[];
}

/** The mark at a cell; it goes when the cell has been run again. */
class Mark {
  constructor(
    readonly cell: CodeCell,
    text: string
  ) {
    this._node.className = 'jp-gpu-ckpt-undone-note';
    this._node.textContent = text;
  }

  /** @param onRun - called when the cell has been run again */
  show(onRun: () => void): void {
    const { cell } = this;
    this._onState = (_, { name, newValue }) => {
      if (name === 'executionCount' && newValue) {
        this.dispose();
        onRun();
      }
    };
    cell.model.stateChanged.connect(this._onState);
    cell.disposed.connect(() => {
      if (!this._isDisposed) {
        this.dispose();
        onRun();
      }
    });
    cell.addClass(UNDONE_CLASS);
    // What is far out of sight gets its parts later, before which it would end up below them.
    void cell.ready.then(() => {
      if (!this._isDisposed) {
        cell.node.prepend(this._node);
      }
    });
  }

  dispose(): void {
    this._isDisposed = true;
    this._node.remove();
    if (!this.cell.isDisposed) {
      this.cell.removeClass(UNDONE_CLASS);
      if (this._onState) {
        this.cell.model.stateChanged.disconnect(this._onState);
      }
    }
  }

  private _isDisposed = false;
  private _node = document.createElement('div');
  private _onState:
    ((_: unknown, args: { name: string; newValue: unknown }) => void) | null =
    null;
}

function codeCells(panel: NotebookPanel): IOpenCell[] {
  const found: IOpenCell[] = [];
  for (const widget of panel.content.widgets) {
    if (widget.model.type === 'code') {
      const cell = widget as CodeCell;
      const timing = cell.model.getMetadata('execution') as
        Record<string, string> | undefined;
      found.push({
        cell,
        id: cell.model.id,
        count: cell.model.executionCount,
        source: cell.model.sharedModel.getSource(),
        ran: timing?.['iopub.execute_input'] ?? null
      });
    }
  }
  return found;
}

/** What a kernel has executed from a counter on; `null` where it does not say. */
async function askHistory(
  kernel: Kernel.IKernelConnection,
  start: number
): Promise<History | null> {
  const content: KernelMessage.IHistoryRequestRange = {
    hist_access_type: 'range',
    output: false,
    raw: true,
    session: 0,
    start,
    // To the end: some kernels take no `null` for that.
    stop: 1_000_000_000
  };
  try {
    const reply = await kernel.requestHistory(content);
    if (reply.content.status !== 'ok') {
      return null;
    }
    const lines = reply.content.history as [number, number, string][];
    return new Map(lines.map(([, count, source]) => [count, source]));
  } catch {
    return null;
  }
}

function timeOut(delay: number): Promise<undefined> {
  return new Promise(resolve => window.setTimeout(resolve, delay, undefined));
}

function dismissed(): string[] {
  try {
    const found = JSON.parse(window.localStorage.getItem(DISMISSED) ?? '[]');
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

function isDismissed(kernelId: string, from: IRestoredFrom): boolean {
  return dismissed().includes(`${kernelId} ${from.restored}`);
}

function rememberDismissed(kernelId: string, from: IRestoredFrom): void {
  const all = [...dismissed(), `${kernelId} ${from.restored}`];
  try {
    window.localStorage.setItem(
      DISMISSED,
      JSON.stringify(all.slice(-REMEMBERED))
    );
  } catch {
    // Storage may be full or forbidden: it is asked about again then.
  }
}
