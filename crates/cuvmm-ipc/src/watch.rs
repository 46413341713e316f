//! What `tracing` is told of an import or an export: a span around it, and an event at its end. Where nobody listens,
//! nothing is measured and no field is looked at.

use std::time::Instant;

use cuvmm_resource::{VirtualMemoryBuffer, VirtualMemoryResource};
use tracing::{Level, Span};

use crate::descriptor::Metadata;
use crate::error::Error;

/// The target of each span and event.
const TARGET: &str = "cuvmm_ipc";

/// Around an import. It tells what was announced, where that is known beforehand. Refused in a forked child, where nothing
/// else is to come first: a subscriber may have locks, too.
pub(crate) fn import_span(resource: &VirtualMemoryResource, announced: Option<&Metadata>) -> Result<Span, Error> {
    resource.device().driver().require_own_process()?;
    let size = announced.map(|metadata| metadata.size);
    let chunks = announced.map(|metadata| metadata.sizes.len());
    Ok(tracing::debug_span!(target: TARGET, "import", size, chunks))
}

/// Imports, in the span.
pub(crate) fn import(
    span: Span,
    work: impl FnOnce() -> Result<VirtualMemoryBuffer, Error>,
) -> Result<VirtualMemoryBuffer, Error> {
    import_with(span, work, |buffer| buffer)
}

/// As [`import`], where what is made is more than the buffer.
pub(crate) fn import_with<T>(
    span: Span,
    work: impl FnOnce() -> Result<T, Error>,
    buffer_of: impl Fn(&T) -> &VirtualMemoryBuffer,
) -> Result<T, Error> {
    watch(span, work, |imported, elapsed_ns| {
        let buffer = imported.as_ref().ok().map(&buffer_of);
        tracing::debug!(
            target: TARGET,
            address = buffer.map(|buffer| display(buffer.address())),
            size = buffer.map(VirtualMemoryBuffer::size),
            chunks = buffer.map(|buffer| buffer.mappings().len()),
            error = imported.as_ref().err().map(display),
            elapsed_ns,
            "import"
        );
    })
}

/// Exports a buffer, in a span that tells which. Refused in a forked child, as an import.
pub(crate) fn export<T>(buffer: &VirtualMemoryBuffer, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    buffer.resource().device().driver().require_own_process()?;
    let span = tracing::debug_span!(
        target: TARGET,
        "export",
        address = %buffer.address(),
        size = buffer.size(),
        chunks = buffer.mappings().len(),
    );
    watch(span, work, |exported, elapsed_ns| {
        tracing::debug!(target: TARGET, error = exported.as_ref().err().map(display), elapsed_ns, "export");
    })
}

fn watch<T>(
    span: Span,
    work: impl FnOnce() -> Result<T, Error>,
    tell: impl FnOnce(&Result<T, Error>, u64),
) -> Result<T, Error> {
    // A subscriber may care for events alone.
    let is_heard = !span.is_disabled() || tracing::enabled!(target: TARGET, Level::DEBUG);
    let start = is_heard.then(Instant::now);
    let _entered = span.enter();
    let result = work();
    if let Some(start) = start {
        tell(&result, u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    result
}
