import { CodeCell } from '@jupyterlab/cells';
import type { Kernel } from '@jupyterlab/services';
import { KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { OperationFollower } from './follower';
import type { IKernelPage } from './pages';

/** How many states' pending requests are remembered, oldest forgotten first. */
const REMEMBERED = 50;

/** A cell whose execution the page still waits for. */
interface IPendingCell {
  messageId: string;
  /** Stop waiting: the prompt loses its asterisk. */
  abandon: () => void;
}

/** The cells of a notebook or console that run or wait for their turn. */
export function pendingCells(page: IKernelPage): IPendingCell[] {
  const pending: IPendingCell[] = [];
  for (const cell of page.cells) {
    if (!(cell instanceof CodeCell)) {
      continue;
    }
    const future = cell.outputArea.future;
    if (!future || future.isDisposed || !isRunning(cell)) {
      continue;
    }
    pending.push({
      messageId: future.msg.header.msg_id,
      abandon: () => {
        future.dispose();
        sayIdle(page.sessionContext.session?.kernel, future.msg.header);
      }
    });
  }
  return pending;
}

/**
 * Let the page's progress indicator hear that a request is over: it counts
 * requests by the kernel's messages, and the dead kernel sends none.
 */
function sayIdle(
  kernel: Kernel.IKernelConnection | null | undefined,
  request: KernelMessage.IExecuteRequestMsg['header']
): void {
  const signal = kernel?.anyMessage;
  if (!kernel || !(signal instanceof Signal)) {
    return;
  }
  const msg = KernelMessage.createMessage<KernelMessage.IStatusMsg>({
    channel: 'iopub',
    msgType: 'status',
    session: kernel.clientId,
    parentHeader: request,
    content: { execution_state: 'idle' }
  });
  signal.emit({ msg, direction: 'recv' });
}

function isRunning(cell: CodeCell): boolean {
  // JupyterLab before 4.4 has no execution state: there the prompt tells.
  const state = (cell.model as { executionState?: string }).executionState;
  return state !== undefined
    ? state === 'running'
    : !!cell.promptNode?.textContent?.includes('*');
}

/**
 * Which requests a restored kernel still knows.
 *
 * A state holds the cell that was running and those that waited for their
 * turn; what was sent later died with the kernel. The server knows only the
 * running one, the page knows what it had sent when the save began.
 */
export class PendingRequests {
  /** @param pages - the open pages of a kernel */
  constructor(
    private readonly _pages: (kernelId: string) => readonly IKernelPage[]
  ) {}

  /** Remember what is pending as a save begins. */
  onOperationStarted(follower: OperationFollower): void {
    const { kind, kernel_id } = follower.operation;
    if (kind !== 'save') {
      return;
    }
    const known = new Set<string>();
    for (const page of this._pages(kernel_id)) {
      pendingCells(page).forEach(cell => known.add(cell.messageId));
    }
    if (known.size === 0) {
      return;
    }
    void follower.done.then(operation => {
      const stateId = operation.result?.state_id ?? operation.state_id;
      if (operation.status === 'done' && stateId) {
        this._known.set(stateId, known);
        if (this._known.size > REMEMBERED) {
          this._known.delete([...this._known.keys()][0]);
        }
      }
    });
  }

  /** Stop waiting for what a kernel restored from a state does not know. */
  abandonUnknown(
    kernelId: string,
    stateId: string | null,
    inFlight: string | null
  ): void {
    const known = this._known.get(stateId ?? '');
    for (const page of this._pages(kernelId)) {
      for (const cell of pendingCells(page)) {
        if (cell.messageId !== inFlight && !known?.has(cell.messageId)) {
          cell.abandon();
        }
      }
    }
  }

  private _known = new Map<string, Set<string>>();
}
