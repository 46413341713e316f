//! Streams, events, captures and host functions.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use super::context::bits;
use super::{Args, Entry, Reply};
use crate::conformance::scene::{GATE, Gate, fire, nothing};
use crate::conformance::value::{Kind, Value};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("stream", stream),
    Entry::call("destroy_stream", destroy_stream),
    Entry::call("sync", sync),
    Entry::call("query", query),
    Entry::call("capturing", capturing),
    Entry::call("capture_info", capture_info),
    Entry::call("begin", begin),
    Entry::call("end", end),
    Entry::call("exchange", exchange),
    Entry::call("stream_context", stream_context),
    Entry::call("stream_device", stream_device),
    Entry::call("wait_event", wait_event),
    Entry::call("event", event),
    Entry::call("record", record),
    Entry::call("query_event", query_event),
    Entry::call("sync_event", sync_event),
    Entry::call("destroy_event", destroy_event),
    Entry::call("host_function", host_function),
    Entry::call("gate", gate),
    Entry::call("mark", mark),
    Entry::other("marked", marked),
];

fn stream(args: &mut Args<'_>) -> Result<Reply, String> {
    let flags = CUstream_flags(args.option("flags", 1)? as u32);
    let mut stream = CUstream::NULL;
    let output = args.output(&mut stream)?;
    let code = call!(args, cuStreamCreate(output, flags));
    Ok(Reply::code(code).output(stream.0.expose_provenance() as u64))
}

fn destroy_stream(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    Ok(Reply::code(call!(args, cuStreamDestroy(stream))))
}

fn sync(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    Ok(Reply::code(call!(args, cuStreamSynchronize(stream))))
}

fn query(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    Ok(Reply::code(call!(args, cuStreamQuery(stream))))
}

fn capturing(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let mut status = CUstreamCaptureStatus::default();
    let output = args.output(&mut status)?;
    let code = call!(args, cuStreamIsCapturing(stream, output));
    Ok(Reply::code(code).number(status.0.into()))
}

fn capture_info(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let (mut status, mut id, mut graph) = (CUstreamCaptureStatus::default(), 0, CUgraph::NULL);
    let (mut dependencies, mut count) = (std::ptr::null(), 0);
    let output = args.output(&mut status)?;
    let code = call!(
        args,
        cuStreamGetCaptureInfo(stream, output, &raw mut id, &raw mut graph, &raw mut dependencies, &raw mut count)
    );
    Ok(Reply::code(code).tell(format!("{} deps={count}", status.0)).output(graph.0.expose_provenance() as u64))
}

const MODES: [(&str, CUstreamCaptureMode); 3] = [
    ("global", CUstreamCaptureMode::GLOBAL),
    ("thread_local", CUstreamCaptureMode::THREAD_LOCAL),
    ("relaxed", CUstreamCaptureMode::RELAXED),
];

fn mode(args: &mut Args<'_>) -> Result<CUstreamCaptureMode, String> {
    let word = args.word()?;
    match MODES.iter().find(|(name, _)| *name == word) {
        Some((_, mode)) => Ok(*mode),
        None => Ok(CUstreamCaptureMode(args.scene.evaluate(word)?.bits as u32)),
    }
}

fn begin(args: &mut Args<'_>) -> Result<Reply, String> {
    let (stream, mode) = (args.stream()?, mode(args)?);
    Ok(Reply::code(call!(args, cuStreamBeginCapture(stream, mode))))
}

fn end(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let mut graph = CUgraph::NULL;
    let output = args.output(&mut graph)?;
    let code = call!(args, cuStreamEndCapture(stream, output));
    Ok(Reply::code(code).output(graph.0.expose_provenance() as u64))
}

fn exchange(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut mode = mode(args)?;
    let output = args.output(&mut mode)?;
    let code = call!(args, cuThreadExchangeStreamCaptureMode(output));
    let name = MODES.iter().find(|(_, named)| *named == mode).map_or("unknown", |(name, _)| name);
    Ok(Reply::code(code).tell(name).output(mode.0.into()))
}

fn stream_context(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let mut context = CUcontext::NULL;
    let output = args.output(&mut context)?;
    let code = call!(args, cuStreamGetCtx(stream, output));
    Ok(Reply::code(code).tell(if context.is_null() { "none" } else { "some" }).output(bits(context)))
}

fn stream_device(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let mut device = CUdevice::default();
    let output = args.output(&mut device)?;
    let code = call!(args, cuStreamGetDevice(stream, output));
    Ok(Reply::code(code).number(device.0 as u64))
}

fn wait_event(args: &mut Args<'_>) -> Result<Reply, String> {
    let (stream, event) = (args.stream()?, CUevent(args.pointer()?));
    let flags = args.option("flags", 0)? as u32;
    Ok(Reply::code(call!(args, cuStreamWaitEvent(stream, event, flags))))
}

fn event(args: &mut Args<'_>) -> Result<Reply, String> {
    let flags = CUevent_flags(args.option("flags", 2)? as u32);
    let mut event = CUevent::NULL;
    let output = args.output(&mut event)?;
    let code = call!(args, cuEventCreate(output, flags));
    Ok(Reply::code(code).output(event.0.expose_provenance() as u64))
}

fn record(args: &mut Args<'_>) -> Result<Reply, String> {
    let (event, stream) = (CUevent(args.pointer()?), args.stream()?);
    Ok(Reply::code(call!(args, cuEventRecord(event, stream))))
}

fn query_event(args: &mut Args<'_>) -> Result<Reply, String> {
    let event = CUevent(args.pointer()?);
    Ok(Reply::code(call!(args, cuEventQuery(event))))
}

fn sync_event(args: &mut Args<'_>) -> Result<Reply, String> {
    let event = CUevent(args.pointer()?);
    Ok(Reply::code(call!(args, cuEventSynchronize(event))))
}

fn destroy_event(args: &mut Args<'_>) -> Result<Reply, String> {
    let event = CUevent(args.pointer()?);
    Ok(Reply::code(call!(args, cuEventDestroy(event))))
}

fn host_function(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let function: CUhostFn = match args.option_word("function") {
        None => Some(nothing),
        Some("null") => None,
        Some(other) => return Err(format!("function={other}: only null can be said")),
    };
    Ok(Reply::code(call!(args, cuLaunchHostFunc(stream, function, std::ptr::null_mut()))))
}

fn gate(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let longest = match args.option("ms", 0)? {
        0 => GATE,
        milliseconds => Duration::from_millis(milliseconds).min(GATE),
    };
    match Gate::close(args.driver(), stream, longest) {
        Ok(gate) => {
            let mut gates = args.scene.gates.lock().unwrap();
            gates.push(gate);
            let number = gates.len() as u64 - 1;
            Ok(Reply::code(CUresult::SUCCESS).output_of(Value { bits: number, kind: Kind::Gate }))
        }
        Err(code) => Ok(Reply::code(code).output(u64::MAX)),
    }
}

/// Queues a host function that leaves a mark.
fn mark(args: &mut Args<'_>) -> Result<Reply, String> {
    let stream = args.stream()?;
    let flag = Arc::new(AtomicBool::new(false));
    // Its share is given back by the function, and else never.
    let data = Arc::into_raw(Arc::clone(&flag)).cast_mut().cast::<c_void>();
    let code = call!(args, cuLaunchHostFunc(stream, Some(fire), data));
    // The share keeps that address from anything else.
    args.scene.fired.lock().unwrap().insert(data.addr(), flag);
    Ok(Reply::code(code).output(data.addr() as u64))
}

/// Whether the mark was left.
fn marked(args: &mut Args<'_>) -> Result<Reply, String> {
    let mark = args.size()?;
    let flag = args.scene.fired.lock().unwrap().get(&mark).cloned().ok_or("no such mark")?;
    Ok(Reply::yes_or_no(flag.load(Ordering::SeqCst)))
}
