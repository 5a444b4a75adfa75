//! How the models of every family come: their markers, and how their templates write calls.

/// A family as its models come: markers of calls and of reasoning, and how the template writes calls.
pub struct Family {
    pub parser: &'static str,
    pub reasoning: &'static str,
    pub markers: &'static [&'static str],
    /// Writes `calls`, a list of functions.
    pub calls: &'static str,
    pub most_calls: usize,
}

const HERMES: Family = Family {
    parser: "hermes",
    reasoning: "think",
    markers: &["<tool_call>", "</tool_call>", "<think>", "</think>"],
    calls: "{% for f in calls %}{{ ('' if loop.first else '\\n') + '<tool_call>\\n{\"name\": ' + (f.name | tojson) + ', \"arguments\": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}",
    most_calls: 9,
};

/// All of them; a family whose models write calls in several ways is there once for each.
pub const FAMILIES: &[Family] = &[
    HERMES,
    Family {
        parser: "llama3_json",
        reasoning: "none",
        markers: &["<|python_tag|>"],
        calls: "{{ '{\"name\": ' + (calls[0].name | tojson) + ', ' }}{{ '\"parameters\": ' }}{{ calls[0].arguments | tojson }}}",
        ..HERMES
    },
    Family {
        parser: "kimi",
        markers: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            "<think>",
            "</think>",
        ],
        calls: "<|tool_calls_section_begin|>{% for f in calls %}<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        ..HERMES
    },
    Family {
        parser: "deepseek",
        markers: DEEPSEEK,
        calls: "<｜tool▁calls▁begin｜>{% for f in calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name + '\\n```json\\n' + (f.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>",
        ..HERMES
    },
    Family {
        parser: "deepseek",
        markers: DEEPSEEK,
        calls: "<｜tool▁calls▁begin｜>{% for f in calls %}<｜tool▁call▁begin｜>{{ f.name + '<｜tool▁sep｜>' + (f.arguments | tojson) }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
        ..HERMES
    },
    Family {
        parser: "cohere",
        reasoning: "cohere",
        markers: &[
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
        ],
        calls: "<|START_ACTION|>[{{ '\\n    ' }}{% for f in calls %}{\"tool_call_id\": \"{{ loop.index0 }}\", \"tool_name\": {{ f.name | tojson }}, \"parameters\": {{ f.arguments | tojson }}}{% if not loop.last %}{{ ',\\n    ' }}{% endif %}{% endfor %}{{ '\\n' }}]<|END_ACTION|>",
        ..HERMES
    },
    Family {
        parser: "mistral",
        reasoning: "mistral",
        markers: &["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
        calls: "[TOOL_CALLS] [{% for f in calls %}{\"name\": {{ f.name | tojson }}, \"arguments\": {{ f.arguments | tojson }}, \"id\": \"abcdefgh{{ loop.index0 }}\"}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}]",
        ..HERMES
    },
    Family {
        parser: "mistral",
        reasoning: "mistral",
        markers: &["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        calls: "{% for f in calls %}[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        ..HERMES
    },
    Family {
        parser: "mistral",
        reasoning: "mistral",
        markers: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"],
        calls: "{% for f in calls %}[TOOL_CALLS]{{ f.name }}[CALL_ID]abcdefgh{{ loop.index0 }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        ..HERMES
    },
    Family {
        parser: "harmony",
        reasoning: "harmony",
        markers: &[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        calls: " to=functions.{{ calls[0].name + '<|channel|>commentary json<|message|>' + (calls[0].arguments | tojson) }}<|call|>",
        most_calls: 1,
    },
    Family {
        parser: "qwen3_coder",
        calls: "{% for f in calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for k, v in f.arguments | items %}{{ '<parameter=' + k + '>\\n' }}{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}",
        ..HERMES
    },
    Family {
        parser: "glm",
        markers: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ],
        calls: "{% for f in calls %}{{ '\\n<tool_call>' + f.name + '\\n' }}{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>{{ v | tojson if v is not string else v }}</arg_value>{{ '\\n' }}{% endfor %}</tool_call>{% endfor %}",
        ..HERMES
    },
    Family {
        parser: "minimax",
        markers: &[
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            "<think>",
            "</think>",
        ],
        calls: "{{ '\\n<minimax:tool_call>\\n' }}{% for f in calls %}<invoke name=\"{{ f.name }}\">{{ '\\n' }}{% for k, v in f.arguments | items %}<parameter name=\"{{ k }}\">{{ v | tojson if v is not string else v }}</parameter>{{ '\\n' }}{% endfor %}</invoke>{{ '\\n' }}{% endfor %}</minimax:tool_call>",
        ..HERMES
    },
    Family {
        parser: "deepseek_v32",
        markers: &["｜DSML｜", "<think>", "</think>"],
        calls: DSML,
        ..HERMES
    },
    Family {
        parser: "gemma4",
        reasoning: "gemma4",
        markers: &[
            "<|tool_call>",
            "<tool_call|>",
            "<|\"|>",
            "<|channel>",
            "<channel|>",
        ],
        calls: "{% macro arg(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}{{ ('' if loop.first else ',') + k + ':' + arg(x) }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}{{ ('' if loop.first else ',') + arg(x) }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}{% for f in calls %}{{ '<|tool_call>call:' + f.name + '{' }}{% for k, v in f.arguments | dictsort %}{{ ('' if loop.first else ',') + k + ':' + arg(v) }}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}",
        ..HERMES
    },
    Family {
        parser: "llama3_pythonic",
        reasoning: "none",
        markers: &["<|tool_call_start|>", "<|tool_call_end|>"],
        calls: "<|tool_call_start|>[{% for f in calls %}{% if not loop.first %}{{ ', ' }}{% endif %}{{ f.name }}({% for k, v in f.arguments | items %}{{ ('' if loop.first else ', ') + k + '=' }}{{ ('\"' + v + '\"') if v is string else v }}{% endfor %}){% endfor %}]<|tool_call_end|>",
        ..HERMES
    },
    Family {
        parser: "llama3_pythonic",
        reasoning: "none",
        markers: &["<|python_start|>", "<|python_end|>"],
        calls: "<|python_start|>[{% for f in calls %}{% if not loop.first %}{{ ', ' }}{% endif %}{{ f.name }}({% for k, v in f.arguments | items %}{{ ('' if loop.first else ', ') + k + '=' }}{{ ('\"' + v + '\"') if v is string else v }}{% endfor %}){% endfor %}]<|python_end|>",
        ..HERMES
    },
];

const DEEPSEEK: &[&str] = &[
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<think>",
    "</think>",
];
const DSML: &str = "{{ '\\n\\n<｜DSML｜function_calls>\\n' }}{% for f in calls %}<｜DSML｜invoke name=\"{{ f.name }}\">{{ '\\n' }}{% for k, v in f.arguments | items %}<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</｜DSML｜parameter>{{ '\\n' }}{% endfor %}</｜DSML｜invoke>{{ '\\n' }}{% endfor %}</｜DSML｜function_calls>";
