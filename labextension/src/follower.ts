import { PromiseDelegate } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { IOperation, KernelStateAPI } from './api';
import { isFinal } from './api';
import type { IOperationEvent } from './events';
import { RequestError } from './request';

/** First wait, in milliseconds, before an operation is asked for. */
const FIRST_POLL = 1000;
/** Longest wait between two polls, in milliseconds. */
const LONGEST_POLL = 15_000;
const BACKOFF = 1.5;
/** Give up on a server that does not answer after so many polls in a row. */
const FAILED_POLLS = 12;

/**
 * Follows one operation to its end.
 *
 * Events move it on; while none arrives the operation is polled, at growing
 * intervals. The end is always read over REST: an event does not carry the
 * result.
 */
export class OperationFollower implements IDisposable {
  constructor(
    operation: IOperation,
    private readonly _api: KernelStateAPI
  ) {
    this._operation = operation;
    if (isFinal(operation)) {
      this._finish(operation);
    } else {
      this._schedule();
    }
  }

  /** Emitted when the operation moved on or ended. */
  get changed(): ISignal<this, IOperation> {
    return this._changed;
  }

  /** The operation at its end; never rejects. */
  get done(): Promise<IOperation> {
    return this._done.promise;
  }

  get operation(): IOperation {
    return this._operation;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    window.clearTimeout(this._timer);
    Signal.clearData(this);
  }

  /** Take in what an event of this operation says. */
  handleEvent(event: IOperationEvent): void {
    if (this._isDisposed || isFinal(this._operation)) {
      return;
    }
    this._delay = FIRST_POLL;
    if (isFinal(event)) {
      void this._poll();
      return;
    }
    this._update({
      ...this._operation,
      state_id: event.state_id ?? this._operation.state_id,
      status: event.status,
      phase: event.phase,
      progress: event.progress
    });
    this._schedule();
  }

  private _schedule(): void {
    window.clearTimeout(this._timer);
    this._timer = window.setTimeout(() => void this._poll(), this._delay);
    this._delay = Math.min(this._delay * BACKOFF, LONGEST_POLL);
  }

  private async _poll(): Promise<void> {
    window.clearTimeout(this._timer);
    let operation: IOperation;
    try {
      operation = await this._api.operation(this._operation.id);
      this._failures = 0;
    } catch (error) {
      const body = (error as RequestError).body;
      this._failures += 1;
      // The server answered that it knows no such operation (it was
      // restarted), or does not answer any more.
      const gone = error instanceof RequestError && error.status === 404;
      if (gone || this._failures >= FAILED_POLLS) {
        this._finish({ ...this._operation, status: 'failed', error: body });
      } else if (!this._isDisposed) {
        this._schedule();
      }
      return;
    }
    if (this._isDisposed || isFinal(this._operation)) {
      return;
    }
    if (isFinal(operation)) {
      this._finish(operation);
    } else {
      this._update(operation);
      this._schedule();
    }
  }

  private _update(operation: IOperation): void {
    const before = this._operation;
    const isSame = operation.phase === before.phase;
    this._operation = {
      ...operation,
      phaseSeen: isSame ? before.phaseSeen : Date.now()
    };
    this._changed.emit(this._operation);
  }

  private _finish(operation: IOperation): void {
    this._update(operation);
    this._done.resolve(this._operation);
    this.dispose();
  }

  private _changed = new Signal<this, IOperation>(this);
  private _delay = FIRST_POLL;
  private _done = new PromiseDelegate<IOperation>();
  private _failures = 0;
  private _isDisposed = false;
  private _operation: IOperation;
  private _timer = 0;
}
