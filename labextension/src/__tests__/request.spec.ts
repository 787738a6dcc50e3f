import { errorBody } from '../request';

describe('errorBody', () => {
  it('takes the server extension at its word', () => {
    const body = { message: 'Busy.', reason: 'busy', hint: 'Wait.' };
    expect(errorBody(409, 'Conflict', body)).toEqual({
      ...body,
      details: null
    });
  });

  it('takes a plain 404 for a missing server extension', () => {
    expect(errorBody(404, 'Not Found', undefined).reason).toBe('no_extension');
    expect(errorBody(404, 'Not Found', { message: 'x' }).reason).toBe(
      'no_extension'
    );
  });

  it('makes do with a status where a proxy answers', () => {
    expect(errorBody(502, 'Bad Gateway', undefined)).toMatchObject({
      message: 'Bad Gateway',
      reason: 'http_error'
    });
    expect(errorBody(599, '', undefined).message).toBe('HTTP 599');
  });
});
