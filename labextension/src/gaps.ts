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
import type { KernelPages } from './pages';
import { RememberedRestores } from './remembered';
import type { RestoreNotices } from './restorenotices';

/** The class of a cell that the kernel knows nothing of. */
const UNDONE_CLASS = 'jp-gpu-ckpt-undone';

/** How long a kernel has to say what it has executed, in milliseconds. */
const HISTORY_TIMEOUT = 2000;

/** The gaps that were dismissed. */
const DISMISSED = new RememberedRestores('jupyter-gpu-ckpt:dismissed-gaps');

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
      const { action, kernel_id } = event;
      if (action === 'restored' && pages.notebooks(kernel_id).length > 0) {
        void model.refresh(kernel_id);
      }
    });
    pages.forEachContext(context => {
      context.statusChanged.connect((_, status) => {
        if (status.endsWith('restarting')) {
          pages.notebooksOf(context).forEach(panel => this._clear(panel));
        }
      });
      context.kernelChanged.connect((_, { newValue }) => {
        for (const panel of pages.notebooksOf(context)) {
          const seen = this._seen.get(panel);
          if (seen && seen.kernelId !== newValue?.id) {
            this._clear(panel);
            this._seen.delete(panel);
          }
        }
      });
    });
  }

  private _onChanged(kernelId: string): void {
    const { model, pages } = this._options;
    const { kernel } = model.entry(kernelId);
    if (!kernel) {
      return;
    }
    const from = kernel.restored_from;
    for (const panel of pages.notebooks(kernelId)) {
      if (!from) {
        // Started empty, from another page maybe.
        this._clear(panel);
        continue;
      }
      const before = this._seen.get(panel);
      // A panel is looked at once for each restore, however often it is told.
      if (before?.restored === from.restored) {
        continue;
      }
      this._seen.set(panel, { kernelId, restored: from.restored });
      if (before && from.cause === 'wake') {
        // What hibernated and woke is the same kernel, with the same gap.
        if (DISMISSED.has(kernelId, before.restored)) {
          DISMISSED.add(kernelId, from.restored);
        }
        if (this._gaps.has(panel)) {
          continue;
        }
      }
      this._clear(panel, true);
      void this._look(panel, kernelId, from);
    }
  }

  /** Find and mark what the kernel does not have of a notebook. */
  private async _look(
    panel: NotebookPanel,
    kernelId: string,
    from: IRestoredFrom
  ): Promise<void> {
    const look = {};
    this._looks.set(panel, look);
    await panel.context.ready;
    const kernel = panel.sessionContext.session?.kernel;
    if (
      !kernel ||
      DISMISSED.has(kernelId, from.restored) ||
      undoneCells(codeCells(panel), from, null).length === 0
    ) {
      return;
    }
    const asked = askHistory(kernel, (from.execution_count ?? 0) + 1);
    const show = (history: History | null) => {
      // It may have been restarted or changed for another one meanwhile.
      const isCurrent =
        this._looks.get(panel) === look &&
        panel.sessionContext.session?.kernel?.id === kernelId;
      if (isCurrent && !panel.isDisposed) {
        const cells = undoneCells(codeCells(panel), from, history);
        this._show(panel, kernelId, from, cells);
      }
    };
    const inTime = await Promise.race([asked, timeOut(HISTORY_TIMEOUT)]);
    show(inTime ?? null);
    if (inTime === undefined) {
      // A kernel in the middle of a cell answers later.
      const late = await asked;
      if (late && this._gaps.has(panel)) {
        show(late);
      }
    }
  }

  private _show(
    panel: NotebookPanel,
    kernelId: string,
    from: IRestoredFrom,
    cells: IOpenCell[]
  ): void {
    const before = this._gaps.get(panel);
    if (!before && cells.length === 0) {
      return;
    }
    // The notice stays, for the new marks.
    before?.dispose();
    const gap = new Gap(kernelId, from, cells, {
      ...this._options,
      runAgain: found => void this._runAgain(panel, found),
      dismiss: () => {
        const restored = this._seen.get(panel)?.restored ?? from.restored;
        DISMISSED.add(kernelId, restored);
        this._clear(panel);
      }
    });
    this._gaps.set(panel, gap);
    gap.show();
  }

  /** Once, however often it is asked for meanwhile. */
  private async _runAgain(
    panel: NotebookPanel,
    cells: CodeCell[]
  ): Promise<void> {
    if (this._running.has(panel)) {
      return;
    }
    this._running.add(panel);
    try {
      const { content, sessionContext } = panel;
      await NotebookActions.runCells(content, cells, sessionContext);
    } finally {
      this._running.delete(panel);
    }
  }

  /**
   * Remove the marks of a notebook, and what was said of them.
   *
   * @param keep - whether what else its notice says stays
   */
  private _clear(panel: NotebookPanel, keep = false): void {
    this._looks.delete(panel);
    this._gaps.get(panel)?.close(keep);
    this._gaps.delete(panel);
  }

  private _gaps = new WeakMap<NotebookPanel, Gap>();
  /** The look that is going on, or was the last: a cleared notebook has none. */
  private _looks = new WeakMap<NotebookPanel, object>();
  private _running = new WeakSet<NotebookPanel>();
  private _seen = new WeakMap<
    NotebookPanel,
    { kernelId: string; restored: string }
  >();
}

export namespace Gaps {
  export interface IOptions {
    model: KernelStates;
    notices: RestoreNotices;
    pages: KernelPages;
    trans: TranslationBundle;
  }
}

/** The marked cells of one notebook, and the notice about them. */
class Gap {
  constructor(
    private readonly _kernelId: string,
    private readonly _from: IRestoredFrom,
    cells: IOpenCell[],
    private readonly _options: Gap.IOptions
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

  /**
   * Remove the marks, and what was said of them.
   *
   * @param keep - whether what else the notice says stays
   */
  close(keep: boolean): void {
    this.dispose();
    this._options.notices.gapClosed(this._kernelId, keep);
  }

  /** Remove the marks only. */
  dispose(): void {
    this._marks.forEach(mark => mark.dispose());
    this._marks = [];
  }

  private _tell(isNew: boolean): void {
    const { dismiss, notices, runAgain, trans } = this._options;
    const count = this._marks.length;
    if (count === 0) {
      // New and without marks: the kernel has them all, as it says late.
      notices.gapClosed(this._kernelId, isNew);
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
        stateId: this._from.state_id,
        // In the order in which they ran; the marks go as they run.
        runAgain: () =>
          runAgain(
            this._marks.map(mark => mark.cell).filter(cell => !cell.isDisposed)
          ),
        dismiss
      },
      isNew
    );
  }

  private _text(): string {
    return this._options.trans.__(
      'Undone: ran after the kernel was saved at %1',
      formatTime(this._from.created)
    );
  }

  private _marks: Mark[];
}

namespace Gap {
  export interface IOptions {
    notices: RestoreNotices;
    trans: TranslationBundle;
    runAgain: (cells: CodeCell[]) => void;
    dismiss: () => void;
  }
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
