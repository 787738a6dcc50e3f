import type { Event } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { IKernel, IOperation, KernelStateAPI } from './api';
import { isFinal } from './api';
import type { IKernelEvent, IOperationEvent, IServerEvent } from './events';
import { parseEvent } from './events';
import { OperationFollower } from './follower';
import type { IErrorBody } from './request';
import { RequestError } from './request';

/** What the page knows of one kernel. */
export interface IKernelEntry {
  /** `null` until the server answered, and where it refused. */
  kernel: IKernel | null;
  /** Why the server refused. */
  error: IErrorBody | null;
  /** The operation going on, if any. */
  operation: IOperation | null;
}

const UNKNOWN: IKernelEntry = { kernel: null, error: null, operation: null };

/**
 * What the page knows of the kernels it shows: one REST read a kernel, kept
 * true by the server's events.
 */
export class KernelStates implements IDisposable {
  constructor(options: KernelStates.IOptions) {
    this.api = options.api;
    this._stream = options.events.stream;
    this._stream.connect(this._onEvent, this);
  }

  readonly api: KernelStateAPI;

  /** Emitted with the kernel's id when an entry changed. */
  get changed(): ISignal<this, string> {
    return this._changed;
  }

  /**
   * Emitted when something happened to a kernel or to a state of it: it was
   * restored, lost, taken over by another server or could not be restored, its
   * GPU is lost, an automatic save failed, or a state was uploaded or deleted.
   */
  get kernelEvent(): ISignal<this, IKernelEvent> {
    return this._kernelEvent;
  }

  /** Emitted when there is a state more or less, or something new of one. */
  get statesChanged(): ISignal<this, void> {
    return this._statesChanged;
  }

  /** Emitted when the server is about to end. */
  get serverEvent(): ISignal<this, IServerEvent> {
    return this._serverEvent;
  }

  /** Emitted when an operation is seen for the first time. */
  get operationStarted(): ISignal<this, OperationFollower> {
    return this._operationStarted;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._stream.disconnect(this._onEvent, this);
    this._followers.forEach(follower => follower.dispose());
    Signal.clearData(this);
  }

  entry(kernelId: string): IKernelEntry {
    return this._entries.get(kernelId) ?? UNKNOWN;
  }

  /** Whether a kernel was seen that this node's driver can park. */
  get hasGpu(): boolean {
    const entries = [...this._entries.values()];
    return this._hadGpu || entries.some(entry => entry.kernel?.can_park);
  }

  /** Read a kernel anew. Never rejects: the entry then says why. */
  async refresh(kernelId: string): Promise<void> {
    const ticket = ++this._lastTicket;
    this._tickets.set(kernelId, ticket);
    let entry: IKernelEntry;
    try {
      const kernel = await this.api.kernel(kernelId);
      entry = { kernel, error: null, operation: kernel.operation };
    } catch (error) {
      const body = (error as RequestError).body;
      entry = { ...UNKNOWN, error: body };
    }
    // A later read must not be overtaken by the answer to an earlier one, and
    // what was forgotten meanwhile stays so.
    if (this._isDisposed || this._tickets.get(kernelId) !== ticket) {
      return;
    }
    if (entry.operation && !isFinal(entry.operation)) {
      this.follow(entry.operation);
    }
    // The follower knows more than this answer, which may be older than it.
    entry.operation = this._operationOf(kernelId);
    this._set(kernelId, entry);
  }

  /** Read all kernels anew, after the connection to the server was lost. */
  async refreshAll(): Promise<void> {
    // It may be a new one, on another node.
    this._hadGpu = false;
    await Promise.all([...this._entries.keys()].map(id => this.refresh(id)));
  }

  /** The kernels that something is known of. */
  get kernelIds(): Iterable<string> {
    return this._entries.keys();
  }

  /** Forget a kernel that runs no more and that no open page shows. */
  forget(kernelId: string): void {
    this._hadGpu ||= !!this._entries.get(kernelId)?.kernel?.can_park;
    this._entries.delete(kernelId);
    this._tickets.delete(kernelId);
  }

  /** Follow an operation; one follower however often it is asked for. */
  follow(operation: IOperation): OperationFollower {
    let follower = this._followers.get(operation.id);
    if (follower) {
      return follower;
    }
    follower = new OperationFollower(operation, this.api);
    this._followers.set(operation.id, follower);
    follower.changed.connect((_, current) => this._onOperation(current));
    void follower.done.then(async final => {
      this._followers.delete(final.id);
      this._statesChanged.emit();
      if (final.kind !== 'verify') {
        await this.refresh(final.kernel_id);
      }
    });
    this._onOperation(operation);
    this._operationStarted.emit(follower);
    return follower;
  }

  private _onEvent(_: unknown, emission: Event.Emission): void {
    const event = parseEvent(emission);
    if (event?.type === 'operation') {
      this._onOperationEvent(event);
    } else if (event?.type === 'kernel') {
      this._kernelEvent.emit(event);
      if (event.action.startsWith('state_')) {
        this._statesChanged.emit();
      }
      if (this._entries.has(event.kernel_id)) {
        void this.refresh(event.kernel_id);
      }
    } else if (event?.type === 'server') {
      this._serverEvent.emit(event);
    }
  }

  private _onOperationEvent(event: IOperationEvent): void {
    const follower = this._followers.get(event.operation_id);
    if (follower) {
      // It tells of the end itself, also where no event does.
      follower.handleEvent(event);
    } else if (isFinal(event)) {
      this._statesChanged.emit();
    } else if (
      // Nothing happens to a kernel while a state of it is checked.
      event.kind !== 'verify' &&
      this._entries.has(event.kernel_id)
    ) {
      this.follow({
        id: event.operation_id,
        kind: event.kind,
        cause: event.cause,
        kernel_id: event.kernel_id,
        path: event.path,
        state_id: event.state_id,
        status: event.status,
        phase: event.phase,
        progress: event.progress,
        started: new Date().toISOString(),
        finished: null,
        result: null,
        error: null
      });
    }
  }

  private _onOperation(operation: IOperation): void {
    const entry = this._entries.get(operation.kernel_id);
    if (!entry || operation.kind === 'verify') {
      return;
    }
    if (!isFinal(operation)) {
      this._set(operation.kernel_id, { ...entry, operation });
      if (operation.kind === 'unpark' && operation.phase === 'waiting') {
        // Only the kernel tells what for.
        void this.refresh(operation.kernel_id);
      }
    }
    // At the end the entry keeps the operation until the read that follows,
    // so that the button does not flicker from saving over ready to saved.
  }

  private _operationOf(kernelId: string): IOperation | null {
    for (const { operation } of this._followers.values()) {
      if (operation.kernel_id === kernelId && operation.kind !== 'verify') {
        return operation;
      }
    }
    return null;
  }

  private _set(kernelId: string, entry: IKernelEntry): void {
    this._entries.set(kernelId, entry);
    this._changed.emit(kernelId);
  }

  private _changed = new Signal<this, string>(this);
  private _entries = new Map<string, IKernelEntry>();
  private _followers = new Map<string, OperationFollower>();
  /** Whether one that is forgotten could be parked. */
  private _hadGpu = false;
  private _isDisposed = false;
  private _kernelEvent = new Signal<this, IKernelEvent>(this);
  private _lastTicket = 0;
  private _operationStarted = new Signal<this, OperationFollower>(this);
  private _serverEvent = new Signal<this, IServerEvent>(this);
  private _statesChanged = new Signal<this, void>(this);
  private _stream: Event.Stream;
  private _tickets = new Map<string, number>();
}

export namespace KernelStates {
  export interface IOptions {
    api: KernelStateAPI;
    /** The server's events; they are only listened to, never sent. */
    events: Event.IManager;
  }
}
