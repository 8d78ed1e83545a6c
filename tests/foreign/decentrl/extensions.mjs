// The published package imports './event-store' for './event-store.js', which bundlers resolve and Node does not.

const EXTENSIONLESS = /^\.{1,2}\/(?!.*\.m?js$)/;

export const resolve = (specifier, context, next) =>
	next(EXTENSIONLESS.test(specifier) ? `${specifier}.js` : specifier, context);
