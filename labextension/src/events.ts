import type { Event } from '@jupyterlab/services';

import type { OperationKind, OperationStatus } from './api';

const OPERATION_SCHEMA =
  'https://schema.jupyter.org/jupyter_gpu_ckpt/operation/v1';
const KERNEL_SCHEMA = 'https://schema.jupyter.org/jupyter_gpu_ckpt/kernel/v1';
const SERVER_SCHEMA = 'https://schema.jupyter.org/jupyter_gpu_ckpt/server/v1';

/** An operation started, moved on or ended. */
export interface IOperationEvent {
  type: 'operation';
  operation_id: string;
  kind: OperationKind;
  cause: string;
  kernel_id: string;
  path: string | null;
  state_id: string | null;
  status: OperationStatus;
  phase: string;
  progress: number;
  message: string | null;
  reason: string | null;
}

/** Something happened to a kernel or to a state of it. */
export interface IKernelEvent {
  type: 'kernel';
  action:
    | 'restored'
    | 'restore_failed'
    | 'lost'
    | 'state_durable'
    | 'state_deleted'
    | 'autosave_failed'
    | 'fenced'
    | 'gpu_lost';
  kernel_id: string;
  path: string | null;
  state_id: string | null;
  cause: 'death' | 'user' | 'lost' | 'wake' | null;
  in_flight_msg_id: string | null;
  execution_count: number | null;
  message: string | null;
  /** Execute requests that came during the restore, or before one that failed. */
  held_msg_ids: string[];
}

/** The server is about to end, or what could be saved before that is saved. */
export interface IServerEvent {
  type: 'server';
  action: 'ends' | 'saved';
  /** Which end: it is told of again when it comes nearer. */
  ending_id: string;
  source: string;
  why: string;
  /** False where it may not come to that. */
  sure: boolean;
  seconds: number | null;
  saved: number;
  /** Notebook paths, or ids, of kernels. */
  not_saved: string[];
  not_uploaded: number;
}

/** The server extension's events among all of the server's; `null` if another's. */
export function parseEvent(
  emission: Event.Emission
): IOperationEvent | IKernelEvent | IServerEvent | null {
  const { schema_id, ...data } = emission;
  switch (schema_id) {
    case OPERATION_SCHEMA:
      return { type: 'operation', ...data } as unknown as IOperationEvent;
    case KERNEL_SCHEMA:
      return { type: 'kernel', ...data } as unknown as IKernelEvent;
    case SERVER_SCHEMA:
      return { type: 'server', ...data } as unknown as IServerEvent;
    default:
      return null;
  }
}
