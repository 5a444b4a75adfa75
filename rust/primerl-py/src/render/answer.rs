//! Answers of a model: their meaning, and what each id adds to it.

use super::Renderer;
use crate::errors::{render_error, with_causes};
use primerl_render::{
    AnswerStream as InnerStream, Delta, Parsed, RenderError, Renderer as Inner, SegmentKind,
};
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde_json::{Value, json};
use std::sync::{Mutex, PoisonError};

/// A part of an answer: kind, text, and the range of its sampled tokens.
type Stretch = (&'static str, String, usize, usize);

/// The meaning of sampled ids.
#[pyclass(frozen, module = "primerl._core")]
pub struct ParsedAnswer(pub(super) Parsed);

#[pymethods]
impl ParsedAnswer {
    #[getter]
    pub(super) fn message<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(pythonize::pythonize(py, &self.0.message)?)
    }

    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    #[getter]
    fn segments(&self) -> Vec<Stretch> {
        let stretch = |segment: &primerl_render::Segment| {
            let kind = match segment.kind {
                SegmentKind::Content => "content",
                SegmentKind::Reasoning => "reasoning",
                SegmentKind::ToolCall(_) => "tool_call",
                SegmentKind::Hidden => "hidden",
            };
            let text = self.0.text[segment.text_range.clone()].to_owned();
            let tokens = &segment.token_range;
            (kind, text, tokens.start, tokens.end)
        };
        self.0.segments.iter().map(stretch).collect()
    }

    #[getter]
    fn malformed(&self) -> Vec<(String, String)> {
        let one = |call: &primerl_render::MalformedCall| {
            let text = self.0.text[call.text_range.clone()].to_owned();
            (call.reason.to_string(), text)
        };
        self.0.malformed.iter().map(one).collect()
    }
}

/// An answer that arrives id by id.
#[pyclass(frozen, module = "primerl._core")]
pub struct AnswerStream {
    /// `None` once it is finished.
    stream: Mutex<Option<InnerStream>>,
    renderer: Py<Renderer>,
}

#[pymethods]
impl AnswerStream {
    fn push<'py>(
        &self,
        py: Python<'py>,
        ids: Vec<u32>,
    ) -> PyResult<Vec<(&'static str, Bound<'py, PyAny>)>> {
        let push = |stream: &mut Option<InnerStream>, renderer: &Inner| {
            stream.as_mut().map(|stream| stream.push(renderer, &ids))
        };
        pieces(py, self.work(py, push)?)
    }

    #[expect(clippy::type_complexity, reason = "a tuple of Python's")]
    fn finish<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Vec<(&'static str, Bound<'py, PyAny>)>, ParsedAnswer)> {
        let finish = |stream: &mut Option<InnerStream>, renderer: &Inner| {
            stream.take().map(|stream| stream.finish(renderer))
        };
        let (deltas, parsed) = self.work(py, finish)?;
        Ok((pieces(py, deltas)?, ParsedAnswer(parsed)))
    }
}

impl AnswerStream {
    pub(super) fn new(stream: InnerStream, renderer: Py<Renderer>) -> AnswerStream {
        AnswerStream {
            stream: Mutex::new(Some(stream)),
            renderer,
        }
    }

    /// Runs without the GIL; an error if the answer is finished.
    fn work<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Option<InnerStream>, &Inner) -> Option<Result<T, RenderError>> + Send,
    ) -> PyResult<T> {
        let renderer = &self.renderer.get().0;
        let done = py.detach(|| {
            let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            work(&mut stream, renderer)
        });
        match done {
            Some(Ok(done)) => Ok(done),
            Some(Err(error)) => Err(render_error(py, with_causes(&error))),
            None => Err(render_error(
                py,
                "the answer is finished; begin another with answer_stream()".to_owned(),
            )),
        }
    }
}

/// Text of content and reasoning; a call as it is in the message.
fn pieces(py: Python<'_>, deltas: Vec<Delta>) -> PyResult<Vec<(&'static str, Bound<'_, PyAny>)>> {
    let piece = |delta| {
        Ok(match delta {
            Delta::Content(text) => ("content", PyString::new(py, &text).into_any()),
            Delta::Reasoning(text) => ("reasoning", PyString::new(py, &text).into_any()),
            Delta::ToolCall {
                id,
                name,
                arguments,
                ..
            } => {
                let mut call =
                    json!({"type": "function", "function": {"name": name, "arguments": arguments}});
                if let Some(id) = id {
                    call["id"] = Value::String(id);
                }
                ("tool_call", pythonize::pythonize(py, &call)?)
            }
        })
    };
    deltas.into_iter().map(piece).collect()
}
