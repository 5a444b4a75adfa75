//! Messages to tokens for Python: conversions of `primerl_render`.

use crate::errors::{fork_error, render_error, with_causes};
use crate::json::from_python;
use primerl_render::{
    AnswerContext, BackendChoice, Description, ExtensionContext, LoadOptions, MaskedIds, Message,
    RenderOptions, Renderer as Inner,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

mod answer;

pub use answer::{AnswerStream, ParsedAnswer};

/// A model folder's tokenizer and chat template. Methods release the GIL while they work.
#[pyclass(frozen, module = "primerl._core")]
pub struct Renderer(Inner);

fn owned<T: DeserializeOwned>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    from_python(name, value)
        .and_then(|json| serde_json::from_value(json).map_err(|error| format!("{name}: {error}")))
        .map_err(|message| render_error(value.py(), message))
}

/// The variables of a template besides the messages, as Python passes them. `now`: seconds since 1970.
fn template_options(
    py: Python<'_>,
    add_generation_prompt: bool,
    tools: Option<&Bound<'_, PyAny>>,
    template_kwargs: Option<&Bound<'_, PyAny>>,
    documents: Option<&Bound<'_, PyAny>>,
    now: Option<f64>,
) -> PyResult<RenderOptions> {
    let time = |seconds| {
        let since = Duration::try_from_secs_f64(seconds).ok();
        let time = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
        time.ok_or_else(|| render_error(py, format!("now: {seconds} is not a time since 1970")))
    };
    let template_kwargs = given("template_kwargs", template_kwargs)?;
    Ok(RenderOptions {
        tools: given("tools", tools)?,
        documents: given("documents", documents)?,
        add_generation_prompt,
        template_kwargs: template_kwargs.unwrap_or_default(),
        now: now.map(time).transpose()?,
    })
}

fn given<T: DeserializeOwned>(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<T>> {
    value.map(|value| owned(name, value)).transpose()
}

/// Checks the description of a parser.
#[pyfunction]
pub fn check_parser(py: Python<'_>, description: &Bound<'_, PyAny>) -> PyResult<()> {
    let description =
        from_python("description", description).map_err(|message| render_error(py, message))?;
    match Description::from_json(description) {
        Ok(_) => Ok(()),
        Err(error) => Err(render_error(py, error.to_string())),
    }
}

/// Little-endian columns: int32 ids, uint8 mask.
type Columns<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);
type ColumnsAndText<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, String);

fn columns<'py>(py: Python<'py>, rendered: &MaskedIds) -> Columns<'py> {
    let ids: Vec<u8> = rendered
        .ids
        .iter()
        .flat_map(|id| id.to_le_bytes())
        .collect();
    (PyBytes::new(py, &ids), PyBytes::new(py, &rendered.mask))
}

impl Renderer {
    fn many(
        &self,
        py: Python<'_>,
        conversations: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<Vec<MaskedIds>> {
        let conversations: Vec<Vec<Message>> = owned("conversations", conversations)?;
        let options = template_options(py, false, tools, template_kwargs, documents, now)?;
        self.work(py, |renderer| {
            renderer.render_many_trainable(&conversations, &options)
        })
    }

    fn work<T, E>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Inner) -> Result<T, E> + Send,
    ) -> PyResult<T>
    where
        T: Send,
        E: std::error::Error + Send,
    {
        py.detach(|| work(&self.0))
            .map_err(|error| render_error(py, with_causes(&error)))
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the keywords of the Python methods"
)]
#[pymethods]
impl Renderer {
    #[new]
    #[pyo3(signature = (model_dir, *, tool_parser=None, reasoning_parser=None, control_tokens=None))]
    fn new(
        py: Python<'_>,
        model_dir: PathBuf,
        tool_parser: Option<&Bound<'_, PyAny>>,
        reasoning_parser: Option<&Bound<'_, PyAny>>,
        control_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let options = LoadOptions {
            tool_parser: given("tool_parser", tool_parser)?,
            reasoning_parser: given("reasoning_parser", reasoning_parser)?,
            control_tokens: given("control_tokens", control_tokens)?.unwrap_or_default(),
        };
        py.detach(|| Inner::load_with(&model_dir, &options))
            .map(Self)
            .map_err(|error| render_error(py, with_causes(&error)))
    }

    #[pyo3(signature = (messages, tools=None, add_generation_prompt=true, template_kwargs=None, documents=None, now=None))]
    fn render_text(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        add_generation_prompt: bool,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<String> {
        let messages: Vec<Message> = owned("messages", messages)?;
        let options = template_options(
            py,
            add_generation_prompt,
            tools,
            template_kwargs,
            documents,
            now,
        )?;
        self.work(py, |renderer| renderer.render_text(&messages, &options))
    }

    #[pyo3(signature = (messages, tools=None, add_generation_prompt=true, template_kwargs=None, documents=None, now=None))]
    fn render(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        add_generation_prompt: bool,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<Vec<u32>> {
        let messages: Vec<Message> = owned("messages", messages)?;
        let options = template_options(
            py,
            add_generation_prompt,
            tools,
            template_kwargs,
            documents,
            now,
        )?;
        self.work(py, |renderer| {
            renderer.check_tools(&options)?;
            renderer.render(&messages, &options)
        })
    }

    #[pyo3(signature = (messages, tools=None, template_kwargs=None))]
    fn trainable<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template_kwargs: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let messages: Vec<Message> = owned("messages", messages)?;
        let options = template_options(py, false, tools, template_kwargs, None, None)?;
        let messages = self.work(py, |renderer| renderer.trainable(messages, &options))?;
        Ok(pythonize::pythonize(py, &messages)?)
    }

    #[pyo3(signature = (messages, tools=None, template_kwargs=None, documents=None, now=None))]
    fn render_with_mask<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<Columns<'py>> {
        let messages: Vec<Message> = owned("messages", messages)?;
        let options = template_options(py, false, tools, template_kwargs, documents, now)?;
        let rendered = self.work(py, |renderer| {
            let messages = renderer.trainable(messages, &options)?;
            renderer.render_with_mask(&messages, &options)
        })?;
        Ok(columns(py, &rendered))
    }

    #[pyo3(signature = (conversations, tools=None, template_kwargs=None, documents=None, now=None))]
    fn render_many_with_mask<'py>(
        &self,
        py: Python<'py>,
        conversations: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<Vec<Columns<'py>>> {
        let rendered = self.many(py, conversations, tools, template_kwargs, documents, now)?;
        Ok(rendered
            .iter()
            .map(|rendered| columns(py, rendered))
            .collect())
    }

    #[pyo3(signature = (conversations, tools=None, template_kwargs=None, documents=None, now=None))]
    fn render_many_with_text<'py>(
        &self,
        py: Python<'py>,
        conversations: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<Vec<ColumnsAndText<'py>>> {
        let rendered = self.many(py, conversations, tools, template_kwargs, documents, now)?;
        let with_text = |rendered: MaskedIds| {
            let (ids, mask) = columns(py, &rendered);
            (ids, mask, rendered.text)
        };
        Ok(rendered.into_iter().map(with_text).collect())
    }

    #[pyo3(signature = (answer, sampled, new_messages, tools=None, template_kwargs=None, documents=None, now=None))]
    fn extend(
        &self,
        py: Python<'_>,
        answer: &Bound<'_, PyAny>,
        sampled: Vec<u32>,
        new_messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template_kwargs: Option<&Bound<'_, PyAny>>,
        documents: Option<&Bound<'_, PyAny>>,
        now: Option<f64>,
    ) -> PyResult<Vec<u32>> {
        let answer: Message = owned("answer", answer)?;
        let new_messages: Vec<Message> = owned("new_messages", new_messages)?;
        let options = template_options(py, true, tools, template_kwargs, documents, now)?;
        let previous = ExtensionContext {
            answer: &answer,
            sampled: &sampled,
            options: &options,
        };
        py.detach(|| self.0.extend(&previous, &new_messages))
            .map_err(|error| fork_error(py, with_causes(&error), error.code()))
    }

    #[pyo3(signature = (conversations=None))]
    fn check_template<'py>(
        &self,
        py: Python<'py>,
        conversations: Option<PathBuf>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let turns = self.work(py, |renderer| match &conversations {
            Some(path) => renderer.check_file(path),
            None => Ok(renderer.check_scenarios()),
        })?;
        Ok(pythonize::pythonize(py, &turns)?)
    }

    #[pyo3(signature = (sampled, tools=None, starts_in_reasoning=false))]
    fn parse<'py>(
        &self,
        py: Python<'py>,
        sampled: Vec<u32>,
        tools: Option<&Bound<'_, PyAny>>,
        starts_in_reasoning: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.parse_answer(py, sampled, tools, starts_in_reasoning)?
            .message(py)
    }

    #[pyo3(signature = (sampled, tools=None, starts_in_reasoning=false))]
    fn parse_answer(
        &self,
        py: Python<'_>,
        sampled: Vec<u32>,
        tools: Option<&Bound<'_, PyAny>>,
        starts_in_reasoning: bool,
    ) -> PyResult<ParsedAnswer> {
        let tools: Option<Vec<Value>> = given("tools", tools)?;
        self.work(py, |renderer| {
            let context = AnswerContext {
                tools: tools.as_deref(),
                starts_in_reasoning,
            };
            renderer.parse_answer(&sampled, &context)
        })
        .map(ParsedAnswer)
    }

    #[pyo3(signature = (tools=None, starts_in_reasoning=false))]
    fn answer_stream(
        slf: &Bound<'_, Self>,
        tools: Option<&Bound<'_, PyAny>>,
        starts_in_reasoning: bool,
    ) -> PyResult<AnswerStream> {
        let tools: Option<Vec<Value>> = given("tools", tools)?;
        let context = AnswerContext {
            tools: tools.as_deref(),
            starts_in_reasoning,
        };
        let stream = slf.get().0.answer_stream(&context);
        Ok(AnswerStream::new(stream, slf.clone().unbind()))
    }

    fn starts_in_reasoning(&self, py: Python<'_>, prompt: Vec<u32>) -> bool {
        py.detach(|| self.0.starts_in_reasoning(&prompt))
    }

    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        self.work(py, |renderer| renderer.tokenizer().encode(text))
    }

    #[pyo3(signature = (ids, skip_special=false))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        self.work(py, |renderer| {
            renderer.tokenizer().decode(&ids, skip_special)
        })
    }

    fn token_bytes<'py>(&self, py: Python<'py>, ids: Vec<u32>) -> Vec<Bound<'py, PyBytes>> {
        let bytes = |id: &u32| PyBytes::new(py, &self.0.tokenizer().token_bytes(*id));
        ids.iter().map(bytes).collect()
    }

    #[getter]
    fn stop_token_ids(&self) -> Vec<u32> {
        self.0.stop_token_ids().to_vec()
    }

    #[getter]
    fn max_positions(&self) -> Option<u32> {
        self.0.max_positions()
    }

    #[getter]
    fn tool_parser(&self) -> &'static str {
        self.0.parsers().tool()
    }

    #[getter]
    fn reasoning_parser(&self) -> &'static str {
        self.0.parsers().reasoning()
    }

    #[getter]
    fn backend(&self) -> &'static str {
        self.0.tokenizer().backend().name()
    }

    #[getter]
    fn backend_reason(&self) -> Option<&str> {
        match self.0.tokenizer().backend() {
            BackendChoice::Fast => None,
            BackendChoice::Stable { reason } => Some(reason),
        }
    }
}
