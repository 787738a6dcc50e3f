import { Notification } from '@jupyterlab/apputils';

/** How long a success stays on screen, in milliseconds. */
const SUCCESS_SHOWN = 6000;

/** After how long JupyterLab has handed on a change to what draws it, in milliseconds. */
const CHANGING = 100;

/** How long a notification may take to be drawn as it was changed, in milliseconds. */
const DRAWING = 10_000;

/** Of what is longer JupyterLab draws the beginning, in characters. */
export const LONGEST_MESSAGE = 140;

/** Those about to go. */
const leaving = new Set<string>();

type Options = Pick<Notification.IOptions<null>, 'autoClose' | 'actions'>;

/**
 * Change a notification, or show a new one where it is gone.
 *
 * @returns its id
 */
export function show(
  id: string | undefined,
  message: string,
  type: 'info' | 'success' | 'warning' | 'error',
  options: Options
): string {
  const change = { id: id ?? '', message, type, ...options };
  if (!id || leaving.has(id) || !Notification.update(change)) {
    return Notification.emit(message, type, options);
  }
  insist(change, Date.now() + DRAWING);
  return id;
}

/**
 * Change a notification again until it is drawn so: JupyterLab loses changes of
 * those that it has only just begun to draw.
 */
function insist(
  change: Notification.IUpdate<null> & { message: string },
  until: number
): void {
  const { id, message } = change;
  window.setTimeout(() => {
    const now = Notification.manager.notifications.find(
      notification => notification.id === id
    );
    if (now?.message !== message || leaving.has(id) || Date.now() > until) {
      return;
    }
    const drawn = document
      .getElementById(id)
      ?.querySelector('.jp-toast-message')?.textContent;
    const wanted = message.slice(0, LONGEST_MESSAGE).replace(/\n/g, '');
    if (drawn?.startsWith(wanted)) {
      return;
    }
    // One that the user has hidden is not brought back.
    if (typeof drawn === 'string') {
      Notification.update(change);
    }
    insist(change, until);
  }, CHANGING);
}

/**
 * Dismiss a notification, once its last change has been handed on: JupyterLab
 * does that a moment later, and would bring back what had gone meanwhile.
 */
export function dismiss(id: string): void {
  leaving.add(id);
  window.setTimeout(() => {
    Notification.dismiss(id);
    leaving.delete(id);
  }, CHANGING);
}

/** How long a notification of a type stays on screen. */
export function closesAfter(
  type: 'info' | 'success' | 'warning'
): number | false {
  return type === 'warning' ? false : SUCCESS_SHOWN;
}

/** Whether a notification is on screen. */
export function isDrawn(id: string): boolean {
  return document.getElementById(id) !== null;
}
