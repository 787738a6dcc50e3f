import type { Event } from '@jupyterlab/services';

import type { OperationKind, OperationStatus } from './api';

const OPERATION_SCHEMA =
  'https://schema.jupyter.org/jupyter_gpu_ckpt/operation/v1';
const KERNEL_SCHEMA = 'https://schema.jupyter.org/jupyter_gpu_ckpt/kernel/v1';

/** An operation started, moved on or ended. */
export interface IOperationEvent {
  type: 'operation';
  operation_id: string;
  kind: OperationKind;
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
  action: 'restored' | 'restore_failed' | 'lost' | 'state_deleted';
  kernel_id: string;
  path: string | null;
  state_id: string | null;
  cause: 'death' | 'user' | 'lost' | null;
  in_flight_msg_id: string | null;
  execution_count: number | null;
  message: string | null;
}

/** The server extension's events among all of the server's; `null` if another's. */
export function parseEvent(
  emission: Event.Emission
): IOperationEvent | IKernelEvent | null {
  const { schema_id, ...data } = emission;
  switch (schema_id) {
    case OPERATION_SCHEMA:
      return { type: 'operation', ...data } as unknown as IOperationEvent;
    case KERNEL_SCHEMA:
      return { type: 'kernel', ...data } as unknown as IKernelEvent;
    default:
      return null;
  }
}
