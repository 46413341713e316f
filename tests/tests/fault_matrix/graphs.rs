//! Giving memory to graphs.

use cuvmm::driver::sys::CUstreamCaptureMode;
use cuvmm::{Error, VirtualMemoryBuffer};
use cuvmm_tests::matrix::{Row, Scene, none};
use cuvmm_tests::{Backend, Capture, G, Graph, Stream, retain_in_capture};

use crate::chunked;

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "retain_in_graph",
        path: "a graph made by hand",
        set_up: |backend| {
            let mut scene = Scene::of(chunked(backend, 2, 8 * G));
            scene.graphs.push(Graph::empty(&backend.driver));
            scene
        },
        operate: |scene| retain_in_graph(scene),
        exception: none,
    },
    Row {
        operation: "retain_in_graph",
        path: "a graph that has the memory already",
        set_up: |backend| {
            let mut scene = Scene::of(chunked(backend, 1, G));
            let graph = Graph::empty(&backend.driver);
            graph.retain(scene.buffer()).unwrap();
            scene.graphs.push(graph);
            scene
        },
        operate: |scene| retain_in_graph(scene),
        exception: none,
    },
    Row {
        operation: "retain_in_capture",
        path: "one on a stream of the resource's context",
        set_up: |backend| capturing(backend, Scene::of(chunked(backend, 2, 8 * G))),
        operate: |scene| {
            retain_in_capture(scene.buffer(), &scene.streams[0])?;
            Ok(None)
        },
        exception: none,
    },
];

/// Any thread may do anything beside it, and end it.
fn capturing(backend: &Backend, mut scene: Scene) -> Scene {
    let stream = Stream::non_blocking(&backend.device);
    scene.capture = Some(Capture::begin(&stream, CUstreamCaptureMode::RELAXED, scene.buffer()));
    scene.streams.push(stream);
    scene
}

fn retain_in_graph(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    scene.graphs[0].retain(scene.buffer())?;
    Ok(None)
}
