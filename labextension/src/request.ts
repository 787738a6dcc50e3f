import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/** Where the server extension's REST API is mounted. */
const NAMESPACE = 'gpu-ckpt/api';

/** What the server says when a request fails. */
export interface IErrorBody {
  message: string;
  reason: string;
  hint: string | null;
  details: string | null;
}

/** Reasons for what is refused in good order: nothing is broken, and the message says what to do. */
const REFUSALS = [
  'bad_request',
  'busy',
  'forbidden',
  'no_space',
  'not_restorable',
  'not_savable',
  'over_quota',
  'pid_in_use'
];

/** Whether something was refused, rather than that it failed. */
export function isRefusal({ reason }: IErrorBody): boolean {
  return REFUSALS.includes(reason);
}

/**
 * A request that the server extension, or the way to it, refused.
 *
 * `reason` is the server's machine-readable cause, or one of
 * `unreachable` (no answer at all) and `no_extension` (the server answers,
 * but the server extension is not enabled).
 */
export class RequestError extends Error {
  constructor(
    readonly status: number,
    readonly body: IErrorBody
  ) {
    super(body.message);
    this.name = 'RequestError';
  }

  get reason(): string {
    return this.body.reason;
  }
}

/**
 * Call the server extension.
 *
 * @param endPoint - the path below the extension's API, with its query
 * @param init - the fetch options
 * @param serverSettings - the settings of the application's service manager
 * @returns the decoded JSON answer, `undefined` where there is no body
 * @throws {@link RequestError}
 */
export async function requestAPI<T>(
  endPoint: string,
  init: RequestInit,
  serverSettings: ServerConnection.ISettings
): Promise<T> {
  const url = URLExt.join(serverSettings.baseUrl, NAMESPACE) + endPoint;

  let response: Response;
  try {
    response = await ServerConnection.makeRequest(url, init, serverSettings);
  } catch (error) {
    throw new RequestError(0, {
      message: error instanceof Error ? error.message : String(error),
      reason: 'unreachable',
      hint: null,
      details: null
    });
  }

  const text = await response.text();
  let data: unknown;
  try {
    data = text ? JSON.parse(text) : undefined;
  } catch {
    // Not ours: a proxy's or the base server's HTML error page.
    data = undefined;
  }
  if (!response.ok) {
    throw new RequestError(
      response.status,
      errorBody(response.status, response.statusText, data)
    );
  }
  return data as T;
}

/** Complete whatever an error answer holds to an error body. */
export function errorBody(
  status: number,
  statusText: string,
  data: unknown
): IErrorBody {
  const body = (
    typeof data === 'object' && data !== null ? data : {}
  ) as Partial<IErrorBody>;
  if (typeof body.reason === 'string' && typeof body.message === 'string') {
    return {
      message: body.message,
      reason: body.reason,
      hint: body.hint ?? null,
      details: body.details ?? null
    };
  }
  return {
    message: body.message || statusText || `HTTP ${status}`,
    // The base server answers a route nobody registered with a plain 404.
    reason: status === 404 ? 'no_extension' : 'http_error',
    hint: null,
    details: null
  };
}
