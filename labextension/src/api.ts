import type { ServerConnection } from '@jupyterlab/services';

import type { IErrorBody } from './request';
import { requestAPI } from './request';

export type OperationStatus =
  'pending' | 'running' | 'done' | 'failed' | 'cancelled';

export type OperationKind = 'save' | 'restore' | 'verify' | 'park' | 'unpark';

/** What to do with a state: replace its kernel, or start a second one. */
export type RestoreMode = 'rollback' | 'new';

/** One thing that differs between a state and the node. */
export interface IDifference {
  what: string;
  message: string;
  blocking: boolean;
  saved: string | null;
  here: string | null;
  /** The only mode it concerns, `null` for both. */
  mode: RestoreMode | null;
}

/** The machine or pod a state was captured on. */
export interface INode {
  id: string;
  hostname: string;
  kernel_release: string;
  cpu: string;
  criu: string | null;
  gpus: string[];
}

/** A connection to a program that is not in the state. */
export interface IOutsideConnection {
  /** What is not `tcp` is connected again where that is possible. */
  protocol: 'tcp' | 'udp' | 'unix';
  /** The other end's address, or the path of its socket. */
  address: string;
  /** The one that was connected to: the kernel's own if `incoming`. */
  port: number | null;
  /** What usually answers there. */
  service: string | null;
  incoming: boolean;
  count: number;
}

/** A file that is not in the state. */
export interface IOutsideFile {
  path: string;
  mode: 'write' | 'append' | 'map';
}

/** What a kernel had that is not in its state. */
export interface IOutside {
  connections: IOutsideConnection[];
  devices: string[];
  files: IOutsideFile[];
  /** How many more there were. */
  left_out: number;
}

/** A GPU of this node. */
export interface IGpuHere {
  index: number;
  uuid: string;
  name: string;
  /** Bytes of its memory that are free now. */
  free: number;
}

/** A GPU that the driver knew when a state was saved. */
export interface ISavedGpu {
  uuid: string;
  name: string;
  memory: number;
  /** Whether the kernel could use it. */
  used: boolean;
  /** Those of this node that can stand for it; none in lists. */
  choices: IGpuHere[];
}

/** What a state has of GPUs. */
export interface ISavedGpus {
  /** On all of them, in bytes. */
  memory: number;
  /** All that the driver knew. */
  gpus: ISavedGpu[];
}

/** Which GPU of this node is to stand for one of the save, by UUID. */
export type GpuMap = Record<string, string>;

/** One saved state; sizes in bytes, durations in seconds, times in UTC. */
export interface IState {
  id: string;
  kernel_id: string;
  kernel_name: string;
  display_name: string;
  path: string | null;
  created: string;
  reason: string;
  label: string | null;
  node: INode;
  size: number;
  stored_size: number;
  frozen_seconds: number;
  execution_count: number | null;
  execution_state: string;
  /** `null` where it was not checked, as in lists. */
  restorable: boolean | null;
  /** In which ways it can be restored here; `null` where not checked. */
  modes: RestoreMode[] | null;
  differences: IDifference[];
  warnings: string[];
  /** The state that it was compared with when it was saved. */
  parent: string | null;
  /** Bytes that deleting it would free; `null` where not asked. */
  cost: number | null;
  /** Removed by nothing but the user. */
  pinned: boolean;
  /** `false` while it is on this node's disk only. */
  durable: boolean;
  encrypted: boolean;
  /** When a check last found it whole. */
  verified: string | null;
  /** What is wrong with it, as far as that is known. */
  damage: string | null;
  /** `null` where it is not known. */
  outside: IOutside | null;
  /** `null` where the kernel had nothing on a GPU. */
  gpu: ISavedGpus | null;
}

/** What memory or data of a kernel is. */
export type ContentsKind =
  'anon' | 'python' | 'libraries' | 'shared' | 'gpu' | 'files' | 'other';

/** All of one kind in a state, in bytes. */
export interface IContentsSum {
  kind: ContentsKind;
  size: number;
  /** What the state before it did not have. */
  new: number;
}

/** What is in a state. */
export interface IContents {
  size: number;
  new: number;
  /** The state before it, `null` where there was none. */
  parent: string | null;
  kinds: IContentsSum[];
}

/** What is lost of a state: a mapping, a shared memory or a file. */
export interface ILostItem {
  kind: ContentsKind;
  name: string;
  /** What is lost of it, in bytes. */
  size: number;
}

/** What a check of a state found. */
export interface IVerification {
  intact: boolean;
  /** What was read, in bytes. */
  size: number;
  /** What of that cannot be read back, in bytes. */
  lost: number;
  items: ILostItem[];
  /** The newest older state of the kernel that is whole. */
  older: string | null;
}

export interface IOperationResult {
  state_id: string;
  kernel_id: string;
  seconds: number;
  size: number;
  frozen_seconds: number | null;
  warnings: string[];
  /** Of a check only. */
  verification: IVerification | null;
}

/** A long operation on one kernel; progress from 0 to 1. */
export interface IOperation {
  id: string;
  kind: OperationKind;
  kernel_id: string;
  path: string | null;
  state_id: string | null;
  status: OperationStatus;
  phase: string;
  /** When this page saw that phase begin, in its own milliseconds. */
  phaseSeen?: number;
  progress: number;
  started: string;
  /** `user`, or which policy or event wanted it. */
  cause: string;
  finished: string | null;
  result: IOperationResult | null;
  error: IErrorBody | null;
}

/** The state that a running kernel came out of. */
export interface IRestoredFrom {
  state_id: string;
  /** When the state was saved. */
  created: string;
  /** When it was restored. */
  restored: string;
  cause: 'death' | 'user' | 'lost' | 'wake';
  /** How far cells were counted at the save, the one that ran then included. */
  execution_count: number | null;
  in_flight_msg_id: string | null;
  /** How far they were counted at the end of the kernel that it replaced, if known. */
  last_execution_count: number | null;
  /** Cells, by id, that had higher counts at the save: an earlier kernel's. */
  other_counts: Record<string, number>;
  /** What the user is to be told with it, as that connections are closed. */
  warnings: string[];
}

/** What a kernel has in host memory instead of on its GPU. */
export interface IParked {
  since: string;
  host_bytes: number;
  /** Its place among those that wait for the GPU, from 1; `null`: it does not. */
  position: number | null;
  /** What it waits for, in the server's words. */
  waiting: string | null;
}

/** A running kernel, and whether it can be saved (if not, `error` says why). */
export interface IKernel {
  id: string;
  name: string;
  display_name: string;
  path: string | null;
  execution_state: string;
  savable: boolean;
  error: IErrorBody | null;
  last_state: IState | null;
  operation: IOperation | null;
  /** `null` for a kernel that was started empty. */
  restored_from: IRestoredFrom | null;
  /** `null` for one that is not parked. */
  parked: IParked | null;
  /** That a GPU is lost which it uses, in the server's words; `null`: none is. */
  gpu_lost: string | null;

  /** Whether the node has a GPU driver that can park kernels. */
  can_park: boolean;
}

/** A kernel that ended without an orderly shutdown and has a state. */
export interface ILostKernel {
  kernel_id: string;
  kernel_name: string;
  display_name: string;
  path: string | null;
  node: string;
  last_seen: string;
  why: 'lost' | 'shutdown' | 'cull' | 'hibernated';
  /** The newest that is not known to be damaged. */
  state: IState;
  /** Ids of newer ones that are. */
  damaged: string[];
  /** Name of the server it ran in, empty for the unnamed one. */
  server: string;
}

/** Whether an operation will not change any more. */
export function isFinal(operation: { status: OperationStatus }): boolean {
  return (
    operation.status === 'done' ||
    operation.status === 'failed' ||
    operation.status === 'cancelled'
  );
}

/** The server extension's REST API. Every method rejects with a RequestError. */
export class KernelStateAPI {
  constructor(private readonly _settings: ServerConnection.ISettings) {}

  kernel(kernelId: string): Promise<IKernel> {
    return this._get(`/kernels/${encodeURIComponent(kernelId)}`);
  }

  save(kernelId: string, label?: string): Promise<IOperation> {
    return this._send(
      'POST',
      `/kernels/${encodeURIComponent(kernelId)}/save`,
      label ? { label } : {}
    );
  }

  /** Save a kernel and end its process until it is needed. */
  hibernate(kernelId: string): Promise<IOperation> {
    return this._send(
      'POST',
      `/kernels/${encodeURIComponent(kernelId)}/hibernate`
    );
  }

  /** Bring a hibernated kernel back. */
  wake(kernelId: string): Promise<IOperation> {
    return this._send('POST', `/kernels/${encodeURIComponent(kernelId)}/wake`);
  }

  /** Move a kernel's GPU memory to host memory. */
  park(kernelId: string): Promise<IOperation> {
    return this._send('POST', `/kernels/${encodeURIComponent(kernelId)}/park`);
  }

  /** Give a parked kernel its GPU back. */
  unpark(kernelId: string): Promise<IOperation> {
    return this._send(
      'POST',
      `/kernels/${encodeURIComponent(kernelId)}/unpark`
    );
  }

  /** The states of a kernel or of a notebook, newest first. */
  states(of: { kernel?: string; path?: string }): Promise<IState[]> {
    const query = new URLSearchParams(of as Record<string, string>);
    return this._get('/states', query);
  }

  /** One state, with what stands in the way of restoring it here. */
  state(stateId: string): Promise<IState> {
    return this._get(`/states/${encodeURIComponent(stateId)}`);
  }

  /** What is inside a state. */
  contents(stateId: string): Promise<IContents> {
    return this._get(`/states/${encodeURIComponent(stateId)}/contents`);
  }

  /** Keep a state until it is deleted by hand, or leave it to the rules. */
  pin(stateId: string, pinned: boolean): Promise<IState> {
    return this._send('PATCH', `/states/${encodeURIComponent(stateId)}`, {
      pinned
    });
  }

  deleteState(stateId: string): Promise<void> {
    return this._send('DELETE', `/states/${encodeURIComponent(stateId)}`);
  }

  /** Read all of a state back. */
  verify(stateId: string): Promise<IOperation> {
    return this._send('POST', `/states/${encodeURIComponent(stateId)}/verify`);
  }

  /** @param gpuMap - GPUs that are chosen; the others are found */
  restore(
    stateId: string,
    mode: RestoreMode,
    gpuMap: GpuMap = {}
  ): Promise<IOperation> {
    return this._send(
      'POST',
      `/states/${encodeURIComponent(stateId)}/restore`,
      { mode, gpu_map: gpuMap }
    );
  }

  lost(): Promise<ILostKernel[]> {
    return this._get('/lost');
  }

  restoreLost(kernelId: string, gpuMap: GpuMap): Promise<IOperation> {
    return this._send('POST', `/lost/${encodeURIComponent(kernelId)}/restore`, {
      gpu_map: gpuMap
    });
  }

  dismissLost(kernelId: string): Promise<void> {
    return this._send(
      'POST',
      `/lost/${encodeURIComponent(kernelId)}/dismiss`,
      {}
    );
  }

  operation(operationId: string): Promise<IOperation> {
    return this._get(`/operations/${encodeURIComponent(operationId)}`);
  }

  /** Ask for an operation to be cancelled; the kernel then runs on as before. */
  cancel(operationId: string): Promise<void> {
    return this._send(
      'DELETE',
      `/operations/${encodeURIComponent(operationId)}`
    );
  }

  private _get<T>(
    endPoint: string,
    query: URLSearchParams = new URLSearchParams()
  ): Promise<T> {
    // What the page reads on its own must not keep an idle server alive.
    query.set('no_track_activity', '1');
    return requestAPI<T>(
      `${endPoint}?${query}`,
      { method: 'GET' },
      this._settings
    );
  }

  private _send<T>(
    method: 'POST' | 'PATCH' | 'DELETE',
    endPoint: string,
    body?: Record<string, string | boolean | GpuMap>
  ): Promise<T> {
    return requestAPI<T>(
      endPoint,
      { method, body: body && JSON.stringify(body) },
      this._settings
    );
  }
}
