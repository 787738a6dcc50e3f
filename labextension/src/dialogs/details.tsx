import type { Notification } from '@jupyterlab/apputils';
import { Dialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IErrorBody } from '../request';
import { namedDialog } from './named';

/** Show all that is known of an error: cause, remedy, and CRIU's own words. */
export async function showDetails(
  title: string,
  error: IErrorBody,
  trans: TranslationBundle
): Promise<void> {
  await namedDialog(title, {
    body: (
      <div className="jp-gpu-ckpt-details">
        <p>{error.message}</p>
        {error.hint && <p>{error.hint}</p>}
        {error.details && (
          // Focusable, so that the keyboard can scroll it; of a role that can have a name.
          <pre tabIndex={0} role="region" aria-label={trans.__('Details')}>
            {error.details}
          </pre>
        )}
      </div>
    ),
    buttons: [Dialog.okButton({ label: trans.__('Close') })]
  }).launch();
}

/** A notification's button that shows all that is known of an error. */
export function detailsAction(
  title: string,
  error: IErrorBody,
  trans: TranslationBundle
): Notification.IAction {
  return {
    label: trans.__('Details'),
    callback: event => {
      // The notification stays for another look.
      event.preventDefault();
      void showDetails(title, error, trans);
    }
  };
}

/** A notification's button that shows what is worth knowing of what went well. */
export function worthKnowing(
  title: string,
  warnings: string[],
  trans: TranslationBundle
): Notification.IAction {
  return detailsAction(
    title,
    {
      message: trans._n(
        'One thing is worth knowing:',
        'Some things are worth knowing:',
        warnings.length
      ),
      reason: 'warnings',
      hint: null,
      details: warnings.join('\n')
    },
    trans
  );
}
