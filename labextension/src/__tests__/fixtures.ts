import type { Event, Kernel } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type {
  IKernel,
  IOperation,
  IOperationResult,
  IOutsideConnection,
  IRestoredFrom,
  IState,
  IVerification,
  KernelStateAPI
} from '../api';
import type { IKernelEvent } from '../events';
import { KernelStates } from '../model';
import type { IErrorBody } from '../request';

export const OPERATION =
  'https://schema.jupyter.org/jupyter_gpu_ckpt/operation/v1';
export const KERNEL = 'https://schema.jupyter.org/jupyter_gpu_ckpt/kernel/v1';

export function aState(change: Partial<IState> = {}): IState {
  return {
    id: 'S1',
    kernel_id: 'K1',
    kernel_name: 'python3',
    display_name: 'Python 3',
    path: 'a.ipynb',
    created: new Date().toISOString(),
    reason: 'user',
    label: null,
    node: {
      id: 'N1',
      hostname: 'node-1',
      kernel_release: '6.1',
      cpu: 'CPU',
      criu: '4.2.1',
      gpus: []
    },
    size: 118_000_000,
    stored_size: 1000,
    frozen_seconds: 0.1,
    execution_count: 3,
    execution_state: 'idle',
    restorable: null,
    modes: null,
    differences: [],
    warnings: [],
    parent: null,
    cost: null,
    pinned: false,
    durable: true,
    encrypted: false,
    verified: null,
    damage: null,
    outside: null,
    gpu: null,
    ...change
  };
}

export function anOperation(change: Partial<IOperation> = {}): IOperation {
  return {
    id: 'O1',
    kind: 'save',
    cause: 'user',
    kernel_id: 'K1',
    path: 'a.ipynb',
    state_id: null,
    status: 'running',
    phase: 'dumping',
    progress: 0.42,
    started: new Date().toISOString(),
    finished: null,
    result: null,
    error: null,
    ...change
  };
}

export function aResult(
  change: Partial<IOperationResult> = {}
): IOperationResult {
  return {
    state_id: 'S1',
    kernel_id: 'K1',
    seconds: 1.2,
    size: 118_000_000,
    frozen_seconds: null,
    warnings: [],
    verification: null,
    ...change
  };
}

export function aVerification(
  change: Partial<IVerification> = {}
): IVerification {
  return {
    intact: true,
    size: 118_000_000,
    lost: 0,
    items: [],
    older: null,
    ...change
  };
}

export function aRestoredFrom(
  change: Partial<IRestoredFrom> = {}
): IRestoredFrom {
  return {
    state_id: 'S1',
    created: '2026-12-02T15:00:00Z',
    restored: '2026-12-02T16:00:00Z',
    cause: 'user',
    execution_count: 1,
    in_flight_msg_id: null,
    last_execution_count: null,
    other_counts: {},
    warnings: [],
    ...change
  };
}

/** That a kernel was restored. */
export function aRestore(change: Partial<IKernelEvent> = {}): IKernelEvent {
  return {
    type: 'kernel',
    action: 'restored',
    kernel_id: 'K1',
    path: 'a.ipynb',
    state_id: 'S1',
    cause: 'user',
    in_flight_msg_id: null,
    execution_count: 1,
    message: null,
    held_msg_ids: [],
    ...change
  };
}

export function aConnection(
  change: Partial<IOutsideConnection> = {}
): IOutsideConnection {
  return {
    protocol: 'tcp',
    address: '10.0.0.5',
    port: 5432,
    service: 'postgresql',
    incoming: false,
    count: 1,
    ...change
  };
}

export function aKernel(change: Partial<IKernel> = {}): IKernel {
  return {
    id: 'K1',
    name: 'python3',
    display_name: 'Python 3',
    path: 'a.ipynb',
    execution_state: 'idle',
    savable: true,
    error: null,
    last_state: null,
    operation: null,
    restored_from: null,
    parked: null,
    gpu_lost: null,
    can_park: true,
    ...change
  };
}

export function anError(change: Partial<IErrorBody> = {}): IErrorBody {
  return {
    message: 'It cannot be captured here.',
    reason: 'cannot_capture',
    hint: null,
    details: null,
    ...change
  };
}

/** The server: what it answers can be changed, what it says is an event. */
export class Server {
  cancel = jest.fn(async () => undefined);
  kernel = jest.fn(async () => aKernel());
  operation = jest.fn(async (): Promise<IOperation> => anOperation());
  state = jest.fn(async (id: string) => aState({ id, restorable: true }));
  stream = new Signal<object, Event.Emission>({});
  verify = jest.fn(async (state_id: string) =>
    anOperation({ kind: 'verify', progress: 0, state_id })
  );

  say(schema_id: string, data: object): void {
    this.stream.emit({ schema_id, ...data } as Event.Emission);
  }

  sayOperation(change: Partial<IOperation>): void {
    const { id, ...operation } = anOperation(change);
    this.say(OPERATION, { ...operation, operation_id: id });
  }

  model(): KernelStates {
    return new KernelStates({
      api: this as unknown as KernelStateAPI,
      events: { stream: this.stream } as unknown as Event.IManager
    });
  }
}

/** The page's list of the kernels that run. */
export class Running {
  runningChanged = new Signal<object, { id: string }[]>({});
  manager = this as unknown as Kernel.IManager;

  /** The server lists other kernels, or says something else of them. */
  are(...ids: string[]): void {
    this.runningChanged.emit(ids.map(id => ({ id })));
  }
}

/** A promise's turn: everything that was already settled has been handled. */
export async function settle(): Promise<void> {
  for (let turn = 0; turn < 10; turn++) {
    await Promise.resolve();
  }
}

/** Wait until something is so. */
export async function until(condition: () => boolean): Promise<void> {
  const end = Date.now() + 30_000;
  while (!condition()) {
    expect(Date.now()).toBeLessThan(end);
    await new Promise(resolve => setTimeout(resolve, 10));
  }
}
