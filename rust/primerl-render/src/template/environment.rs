//! minijinja set up to behave as the Jinja environment of `transformers` (`chat_template_utils.py`):
//! the same white-space rules, filters and functions, so that templates give the same bytes.

use super::arguments::invalid;
use super::clock::strftime_now;
use super::filters;
use super::python_text::call_method;
use super::python_value::{as_float, is_container, python_str};
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, State};

/// Name under which a rewritten `{% generation %}` block reaches [`generation_span`].
pub(super) const GENERATION_FILTER: &str = "__primerl_generation";
/// Name of [`iterable`] in the rewritten loops.
pub(super) const ITERABLE_FUNCTION: &str = "__primerl_iterable";
/// Around the text of a generation block, when the caller asked for them (variable [`MARK_GENERATION`]).
pub(crate) const SPAN_START: &str = "\u{f0001}\u{f0a11}\u{f0002}";
pub(crate) const SPAN_END: &str = "\u{f0001}\u{f0b22}\u{f0002}";
pub(super) const MARK_GENERATION: &str = "__primerl_mark_generation";

/// Instructions after which a template is reported as endless: half a minute. Templates that look at all messages for each
/// message take a tenth of it for a thousand messages. Recursion has minijinja's own limit.
pub(super) const MOST_STEPS: u64 = 1_000_000_000;

pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(MOST_STEPS));
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(call_method);
    environment.set_formatter(|out, state, value| {
        if as_float(value).is_some() || is_container(value) {
            Ok(out.write_str(&python_str(value))?)
        } else {
            minijinja::escape_formatter(out, state, value)
        }
    });
    filters::add(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function(ITERABLE_FUNCTION, iterable);
    environment.add_filter(GENERATION_FILTER, generation_span);
    environment
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(invalid(message))
}

fn iterable(value: Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(invalid("none is not iterable"));
    }
    Ok(value)
}

fn generation_span(state: &State, body: String) -> String {
    match state.lookup(MARK_GENERATION) {
        Some(mark) if mark.is_true() => format!("{SPAN_START}{body}{SPAN_END}"),
        _ => body,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::ErrorKind;

    fn kind(source: &str) -> ErrorKind {
        let mut environment = environment();
        environment.set_fuel(Some(100_000));
        let rendered = environment.render_str(source, ());
        rendered.expect_err("does not end").kind()
    }

    #[test]
    fn a_template_that_does_not_end_is_stopped() {
        let rows = "{% for x in range(10000) %}{% for y in range(10000) %}{% endfor %}{% endfor %}";
        assert_eq!(kind(rows), ErrorKind::OutOfFuel);
        assert_eq!(kind("{{ range(100000000) }}"), ErrorKind::InvalidOperation);
        let recursion = "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(1) }}";
        assert_eq!(kind(recursion), ErrorKind::InvalidOperation);
        let tree = "{% macro f(n) %}{% if n < 30 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}";
        assert_eq!(kind(tree), ErrorKind::OutOfFuel);
    }
}
