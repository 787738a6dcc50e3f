import { CodeCell } from '@jupyterlab/cells';
import type { Kernel } from '@jupyterlab/services';
import { KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { IKernelEvent } from './events';
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

/** The cells of a page whose last run was one of these requests, in order. */
export function cellsOf(
  page: IKernelPage,
  requests: readonly string[]
): CodeCell[] {
  const cells = [...page.cells].filter(cell => cell instanceof CodeCell);
  return requests.flatMap(request =>
    cells.filter(
      ({ outputArea }) => outputArea.future?.msg.header.msg_id === request
    )
  );
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
 * turn; what was sent later died with the kernel, except what came after the
 * restore had begun, which the server keeps for it. Of a state the server knows
 * only the running one, the page knows what it had sent when the save began.
 */
export class PendingRequests {
  /** @param pages - the open pages of a kernel */
  constructor(
    private readonly _pages: (kernelId: string) => readonly IKernelPage[]
  ) {}

  /** Remember what is pending as a save or a restore begins. */
  onOperationStarted(follower: OperationFollower): void {
    const { kind, kernel_id } = follower.operation;
    if (kind !== 'save' && kind !== 'restore') {
      return;
    }
    const known = new Set<string>();
    for (const page of this._pages(kernel_id)) {
      pendingCells(page).forEach(cell => known.add(cell.messageId));
    }
    if (kind === 'restore') {
      this._before.set(kernel_id, known);
      void follower.done.then(() => {
        if (this._before.get(kernel_id) === known) {
          this._before.delete(kernel_id);
        }
      });
      return;
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

  /** Stop waiting for what a restored kernel does not know. */
  abandonUnknown(event: IKernelEvent): void {
    const { kernel_id, state_id, in_flight_msg_id, held_msg_ids } = event;
    const known = this._known.get(state_id ?? '');
    const before = this._before.get(kernel_id);
    for (const page of this._pages(kernel_id)) {
      for (const { messageId, abandon } of pendingCells(page)) {
        const isKnown =
          messageId === in_flight_msg_id ||
          known?.has(messageId) ||
          held_msg_ids.includes(messageId);
        // What was sent after the restore began is on its way to the kernel.
        if (!isKnown && (before?.has(messageId) ?? true)) {
          abandon();
        }
      }
    }
  }

  private _before = new Map<string, Set<string>>();
  private _known = new Map<string, Set<string>>();
}
