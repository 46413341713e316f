//! Graphs and user objects.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;

use super::{Args, Entry, Reply};
use crate::conformance::scene::{fire, nothing};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("graph", graph),
    Entry::call("destroy_graph", destroy_graph),
    Entry::call("instantiate", instantiate),
    Entry::call("launch_graph", launch_graph),
    Entry::call("destroy_exec", destroy_exec),
    Entry::call("memset_node", memset_node),
    Entry::call("memcpy_node", memcpy_node),
    Entry::call("host_node", host_node),
    Entry::call("user_object", user_object),
    Entry::call("retain_object", retain_object),
    Entry::call("release_object", release_object),
    Entry::call("graph_retain", graph_retain),
    Entry::call("graph_release", graph_release),
    Entry::other("fired", fired),
    Entry::other("await_fired", await_fired),
];

fn graph(args: &mut Args<'_>) -> Result<Reply, String> {
    let flags = args.option("flags", 0)? as u32;
    let mut graph = CUgraph::NULL;
    let output = args.output(&mut graph)?;
    let code = call!(args, cuGraphCreate(output, flags));
    Ok(Reply::code(code).output(graph.0.expose_provenance() as u64))
}

fn destroy_graph(args: &mut Args<'_>) -> Result<Reply, String> {
    let graph = CUgraph(args.pointer()?);
    Ok(Reply::code(call!(args, cuGraphDestroy(graph))))
}

fn instantiate(args: &mut Args<'_>) -> Result<Reply, String> {
    let graph = CUgraph(args.pointer()?);
    let flags = args.option("flags", 0)?;
    let mut executable = CUgraphExec::NULL;
    let output = args.output(&mut executable)?;
    let code = call!(args, cuGraphInstantiateWithFlags(output, graph, flags));
    Ok(Reply::code(code).output(executable.0.expose_provenance() as u64))
}

fn launch_graph(args: &mut Args<'_>) -> Result<Reply, String> {
    let (executable, stream) = (CUgraphExec(args.pointer()?), args.stream()?);
    Ok(Reply::code(call!(args, cuGraphLaunch(executable, stream))))
}

fn destroy_exec(args: &mut Args<'_>) -> Result<Reply, String> {
    let executable = CUgraphExec(args.pointer()?);
    Ok(Reply::code(call!(args, cuGraphExecDestroy(executable))))
}

/// The node of `after=`, if there is one.
fn dependencies(args: &mut Args<'_>) -> Result<Vec<CUgraphNode>, String> {
    let Some(text) = args.option_word("after") else { return Ok(Vec::new()) };
    let nodes = text.split(',').map(|node| {
        let bits = args.scene.evaluate(node)?.bits as usize;
        Ok(CUgraphNode(std::ptr::with_exposed_provenance_mut(bits)))
    });
    nodes.collect()
}

/// The context that is current, for nodes to run in; NULL without one.
fn current(args: &Args<'_>) -> CUcontext {
    let mut context = CUcontext::NULL;
    // A failure leaves NULL, which the call itself then judges.
    let _ = call!(args, cuCtxGetCurrent(&raw mut context));
    context
}

fn memset_node(args: &mut Args<'_>) -> Result<Reply, String> {
    let (graph, address) = (CUgraph(args.pointer()?), args.address()?);
    let (value, count) = (args.value()? as u32, args.size()?);
    let element_size = args.option("size", 4)? as u32;
    let height = args.option("height", 1)? as usize;
    let after = dependencies(args)?;
    let parameters = CUDA_MEMSET_NODE_PARAMS { dst: address, pitch: 0, value, element_size, width: count, height };
    let context = current(args);
    let mut node = CUgraphNode::NULL;
    let output = args.output(&mut node)?;
    let code =
        call!(args, cuGraphAddMemsetNode(output, graph, after.as_ptr(), after.len(), &raw const parameters, context));
    Ok(Reply::code(code).output(node.0.expose_provenance() as u64))
}

fn memcpy_node(args: &mut Args<'_>) -> Result<Reply, String> {
    let (graph, to, from) = (CUgraph(args.pointer()?), args.address()?, args.address()?);
    let bytes = args.size()?;
    let after = dependencies(args)?;
    let height = args.option("height", 1)? as usize;
    let parameters = CUDA_MEMCPY3D { height, ..CUDA_MEMCPY3D::linear(to, from, bytes) };
    let context = current(args);
    let mut node = CUgraphNode::NULL;
    let output = args.output(&mut node)?;
    let code =
        call!(args, cuGraphAddMemcpyNode(output, graph, after.as_ptr(), after.len(), &raw const parameters, context));
    Ok(Reply::code(code).output(node.0.expose_provenance() as u64))
}

fn host_node(args: &mut Args<'_>) -> Result<Reply, String> {
    let graph = CUgraph(args.pointer()?);
    let after = dependencies(args)?;
    let parameters = CUDA_HOST_NODE_PARAMS { host_fn: Some(nothing), user_data: std::ptr::null_mut() };
    let mut node = CUgraphNode::NULL;
    let output = args.output(&mut node)?;
    let code = call!(args, cuGraphAddHostNode(output, graph, after.as_ptr(), after.len(), &raw const parameters));
    Ok(Reply::code(code).output(node.0.expose_provenance() as u64))
}

fn user_object(args: &mut Args<'_>) -> Result<Reply, String> {
    let references = args.option("refs", 1)? as u32;
    let flags = args.option("flags", 1)? as u32;
    let flag = Arc::new(AtomicBool::new(false));
    // Its share is given back by the destructor, and else never.
    let data = Arc::into_raw(Arc::clone(&flag)).cast_mut().cast::<c_void>();
    let mut object = CUuserObject::NULL;
    let output = args.output(&mut object)?;
    let code = call!(args, cuUserObjectCreate(output, data, Some(fire), references, flags));
    args.scene.fired.lock().unwrap().insert(object.0.addr(), flag);
    Ok(Reply::code(code).output(object.0.expose_provenance() as u64))
}

fn retain_object(args: &mut Args<'_>) -> Result<Reply, String> {
    let (object, count) = (CUuserObject(args.pointer()?), args.value()? as u32);
    Ok(Reply::code(call!(args, cuUserObjectRetain(object, count))))
}

fn release_object(args: &mut Args<'_>) -> Result<Reply, String> {
    let (object, count) = (CUuserObject(args.pointer()?), args.value()? as u32);
    Ok(Reply::code(call!(args, cuUserObjectRelease(object, count))))
}

fn graph_retain(args: &mut Args<'_>) -> Result<Reply, String> {
    let (graph, object) = (CUgraph(args.pointer()?), CUuserObject(args.pointer()?));
    let (count, flags) = (args.option("count", 1)? as u32, args.option("move", 0)? as u32);
    Ok(Reply::code(call!(args, cuGraphRetainUserObject(graph, object, count, flags))))
}

fn graph_release(args: &mut Args<'_>) -> Result<Reply, String> {
    let (graph, object) = (CUgraph(args.pointer()?), CUuserObject(args.pointer()?));
    let count = args.option("count", 1)? as u32;
    Ok(Reply::code(call!(args, cuGraphReleaseUserObject(graph, object, count))))
}

fn flag(args: &mut Args<'_>) -> Result<Arc<AtomicBool>, String> {
    let object = args.size()?;
    args.scene.fired.lock().unwrap().get(&object).cloned().ok_or_else(|| "no such user object".to_owned())
}

fn fired(args: &mut Args<'_>) -> Result<Reply, String> {
    Ok(Reply::yes_or_no(flag(args)?.load(Ordering::SeqCst)))
}

fn await_fired(args: &mut Args<'_>) -> Result<Reply, String> {
    let flag = flag(args)?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while !flag.load(Ordering::SeqCst) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Reply::yes_or_no(flag.load(Ordering::SeqCst)))
}
