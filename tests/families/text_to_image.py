"""Text to image: one tiny builder a family."""

from functools import partial
from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanImage,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    BriaFiboPipeline,
    BriaFiboTransformer2DModel,
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    ConfigMixin,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanDiTPipeline,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    Kandinsky5T2IPipeline,
    Kandinsky5Transformer3DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    LuminaPipeline,
    ModelMixin,
    NucleusMoEImagePipeline,
    NucleusMoEImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    PRXPipeline,
    PRXTransformer2DModel,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.nucleusmoe_image.pipeline_nucleusmoe_image import DEFAULT_SYSTEM_PROMPT
from transformers import (
    ByT5Tokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Mistral3Model,
    Qwen3Model,
    Qwen3VLModel,
    UMT5Config,
    UMT5EncoderModel,
)

from families.family import Family
from families.language_models import (
    bert,
    bert_tokenizer,
    gemma,
    gemma2,
    gemma_tokenizer,
    glm,
    learn_words,
    llama,
    llama_tokenizer,
    mistral3,
    pixtral_processor,
    plain_tokenizer,
    qwen2_5_vl,
    qwen2_vl_processor,
    qwen3,
    qwen3_vl,
    qwen3_vl_processor,
    qwen_tokenizer,
    smollm3,
    t5gemma,
)
from families.parts import (
    awake,
    clip_text_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
    vae,
)

LETTERS = 48
"""Longest prompt, in letters: a token is a letter."""


def lively(transformer: torch.nn.Module) -> Any:
    """Undoes the shrinking of torch's initialisation, by 3 ** 0.5 a layer: the text is heard."""
    for layer in transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data *= 3**0.5
    return awake(transformer)


def flow_euler(**config: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**config)


def dynamic_flow_euler(max_shift: float = 1.15, **config: Any) -> Any:
    """The shift grows with the number of picture tokens, as in Flux."""
    return flow_euler(use_dynamic_shifting=True, base_shift=0.5, max_shift=max_shift, **config)


def qwen_vae() -> AutoencoderKLQwenImage:
    """Two levels, four latent channels; the Wan VAE's twin for pictures."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.5, 2.0, 1.0, 1.2],
    ).eval()


def wan_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.5, 2.0, 1.0, 1.2],
    ).eval()


def flux2_vae() -> AutoencoderKLFlux2:
    """Its batch normalisation normalises 2 x 2 patches of latents."""
    model = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
    )
    model.bn.running_mean.normal_(std=0.1)
    return model.eval()


def flux() -> FluxPipeline:
    torch.manual_seed(0)
    tokenizer, t5 = clip_tokenizer(max_length=LETTERS), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    return FluxPipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=vae(),
        text_encoder=clip_text_encoder(CLIPTextModel, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
    )


def sd3(layers: int = 2) -> StableDiffusion3Pipeline:
    """The first layer has the second attention of SD3.5 medium."""
    torch.manual_seed(0)
    tokenizer, t5 = clip_tokenizer(max_length=LETTERS), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return StableDiffusion3Pipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=3.0),
        vae=vae(),
        text_encoder=clip_text_encoder(CLIPTextModelWithProjection, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=clip_text_encoder(CLIPTextModelWithProjection, tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=t5_encoder(t5, width=32),
        tokenizer_3=t5,
    )


def qwen_image() -> QwenImagePipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = QwenImagePipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(0.9, max_image_seq_len=8192, shift_terminal=0.02),
        vae=qwen_vae(),
        text_encoder=qwen2_5_vl(tokenizer),
        tokenizer=tokenizer,
    )
    learn_words(tokenizer, pipe.prompt_template_encode)
    return pipe


def z_image(shift: float = 6.0) -> ZImagePipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    return ZImagePipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=shift),
        vae=vae(),
        text_encoder=qwen3(tokenizer),
        tokenizer=tokenizer,
    )


def flux2_transformer(guidance_embeds: bool) -> Flux2Transformer2DModel:
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * 16,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    return lively(transformer)


def flux2() -> Flux2Pipeline:
    torch.manual_seed(0)
    tokenizer = plain_tokenizer()
    pipe = Flux2Pipeline(
        transformer=flux2_transformer(guidance_embeds=True),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=flux2_vae(),
        text_encoder=mistral3(tokenizer, layers=3),
        tokenizer=pixtral_processor(tokenizer),
    )
    learn_words(tokenizer, pipe.system_message)
    return pipe


def flux2_klein() -> Flux2KleinPipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    return Flux2KleinPipeline(
        transformer=flux2_transformer(guidance_embeds=False),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=flux2_vae(),
        text_encoder=qwen3(tokenizer, layers=3),
        tokenizer=tokenizer,
    )


def lumina2() -> Lumina2Pipeline:
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=36,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(128, 32, 32),
        cap_feat_dim=16,
    )
    pipe = Lumina2Pipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=6.0),
        vae=vae(),
        text_encoder=gemma2(tokenizer),
        tokenizer=tokenizer,
    )
    learn_words(tokenizer, pipe.system_prompt)
    return pipe


def sana() -> SanaPipeline:
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=32,
    )
    autoencoder = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    return SanaPipeline(
        transformer=lively(transformer),
        scheduler=scheduler,
        vae=autoencoder.eval(),
        text_encoder=gemma2(tokenizer),
        tokenizer=tokenizer,
    )


def cogview4() -> CogView4Pipeline:
    torch.manual_seed(0)
    tokenizer = plain_tokenizer()
    transformer = CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(8, 8),
        sample_size=8,
    )
    return CogView4Pipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
        vae=vae(),
        text_encoder=glm(tokenizer),
        tokenizer=tokenizer,
    )


def aura_flow() -> AuraFlowPipeline:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2
    )
    return AuraFlowPipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=1.73),
        vae=vae(shift_factor=None),
        text_encoder=UMT5EncoderModel(config).eval(),
        tokenizer=tokenizer,
    )


def chroma() -> ChromaPipeline:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return ChromaPipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=1.0, use_beta_sigmas=True),
        vae=vae(),
        text_encoder=t5_encoder(tokenizer),
        tokenizer=tokenizer,
    )


def hunyuan_image(distilled: bool = False) -> HunyuanImagePipeline:
    """Guidance is a part of the pipeline; the distilled model has an embedding and MeanFlow."""
    torch.manual_seed(0)
    tokenizer, byt5_tokenizer = qwen_tokenizer(), ByT5Tokenizer()
    transformer = HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        rope_axes_dim=(4, 4),
        guidance_embeds=distilled,
        use_meanflow=distilled,
    )
    autoencoder = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
        scaling_factor=0.75,
    )
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)
    pipe = HunyuanImagePipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=4.0 if distilled else 5.0),
        vae=autoencoder.eval(),
        text_encoder=qwen2_5_vl(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(byt5_tokenizer),
        tokenizer_2=byt5_tokenizer,
        guider=None if distilled else guider,
        ocr_guider=None if distilled else guider,
    )
    learn_words(tokenizer, pipe.prompt_template_encode)
    pipe.tokenizer_max_length = LETTERS  # instead of 1000, to save time
    pipe.tokenizer_2_max_length = 16
    return pipe


def hidream() -> HiDreamImagePipeline:
    """It makes pictures of 128 x 128 latent pixels whatever the call says: large patches."""
    torch.manual_seed(0)
    clip, t5, llama_spelling = clip_tokenizer(max_length=LETTERS), t5_tokenizer(), llama_tokenizer()
    transformer = HiDreamImageTransformer2DModel(
        patch_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[16, 16],
        text_emb_dim=32,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(128, 128),
        llama_layers=[0, 1],
    )
    scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    return HiDreamImagePipeline(
        transformer=lively(transformer),
        scheduler=scheduler,
        vae=vae(
            block_out_channels=(4,),
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            norm_num_groups=2,
            mid_block_add_attention=False,
        ),
        text_encoder=clip_text_encoder(CLIPTextModelWithProjection, clip),
        tokenizer=clip,
        text_encoder_2=clip_text_encoder(CLIPTextModelWithProjection, clip),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
        text_encoder_4=llama(llama_spelling),
        tokenizer_4=llama_spelling,
    )


def kandinsky5() -> Kandinsky5T2IPipeline:
    torch.manual_seed(0)
    tokenizer, clip = qwen_tokenizer(), clip_tokenizer(max_length=77)
    transformer = Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
    )
    pipe = Kandinsky5T2IPipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=3.0),
        vae=vae(),
        text_encoder=qwen2_5_vl(tokenizer),
        tokenizer=qwen2_vl_processor(tokenizer),
        text_encoder_2=clip_text_encoder(CLIPTextModel, clip),
        tokenizer_2=clip,
    )
    learn_words(tokenizer, pipe.prompt_template)
    pipe.resolutions = [(64, 64)]  # others than the listed ones are not made
    return pipe


def bria_fibo() -> BriaFiboPipeline:
    torch.manual_seed(0)
    tokenizer = plain_tokenizer(padding_side="right")
    transformer = BriaFiboTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        text_encoder_dim=16,
        axes_dims_rope=[4, 6, 6],
    )
    return BriaFiboPipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=wan_vae(),
        text_encoder=smollm3(tokenizer),
        tokenizer=tokenizer,
    )


def ovis_image() -> OvisImagePipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = OvisImagePipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=vae(),
        text_encoder=qwen3(tokenizer, cls=Qwen3Model),
        tokenizer=tokenizer,
    )
    learn_words(tokenizer, pipe.system_prompt)
    return pipe


def krea2() -> Krea2Pipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = Krea2Pipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(max_image_seq_len=6400),
        vae=qwen_vae(),
        text_encoder=qwen3_vl(tokenizer, cls=Qwen3VLModel),
        tokenizer=tokenizer,
        text_encoder_select_layers=(1, 2),
    )
    learn_words(tokenizer, pipe.prompt_template_encode_prefix)
    return pipe


def lumina() -> LuminaPipeline:
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    transformer = LuminaNextDiT2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=16,
        num_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=16,
    )
    torch.nn.init.normal_(transformer.pad_token)
    return LuminaPipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(),
        vae=vae(),
        text_encoder=gemma(tokenizer),
        tokenizer=tokenizer,
    )


def prx() -> PRXPipeline:
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    transformer = PRXTransformer2DModel(
        in_channels=4,
        context_in_dim=16,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        axes_dim=[4, 4],
    )
    return PRXPipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=3.0),
        vae=vae(),
        text_encoder=t5gemma(tokenizer).encoder,
        tokenizer=tokenizer,
    )


def longcat_image() -> LongCatImagePipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 6, 6],
    )
    pipe = LongCatImagePipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(shift=3.0),
        vae=vae(latent_channels=16),
        text_encoder=qwen2_5_vl(tokenizer),
        tokenizer=tokenizer,
        text_processor=qwen2_vl_processor(tokenizer),
    )
    learn_words(tokenizer, pipe.prompt_template_encode_prefix)
    return pipe


def ernie_image() -> ErnieImagePipeline:
    """Without the language model that rewrites prompts, which is optional."""
    torch.manual_seed(0)
    tokenizer = plain_tokenizer()
    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return ErnieImagePipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(shift=3.0),
        vae=flux2_vae(),
        text_encoder=mistral3(tokenizer, cls=Mistral3Model, text_type="ministral3"),
        tokenizer=tokenizer,
    )


def nucleus() -> NucleusMoEImagePipeline:
    """A dense block, then one with experts."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=2,
        moe_intermediate_dim=16,
        capacity_factors=1.0,
    )
    experts = transformer.transformer_blocks[1].img_mlp.experts
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    learn_words(tokenizer, DEFAULT_SYSTEM_PROMPT)
    return NucleusMoEImagePipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(),
        vae=qwen_vae(),
        text_encoder=qwen3_vl(tokenizer, layers=3),
        processor=qwen3_vl_processor(tokenizer),
    )


def cogview3_plus() -> CogView3PlusPipeline:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = CogView3PlusTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        set_alpha_to_one=True,
        snr_shift_scale=4.0,
        timestep_spacing="trailing",
    )
    return CogView3PlusPipeline(
        transformer=lively(transformer),
        scheduler=scheduler,
        vae=vae(),
        text_encoder=t5_encoder(tokenizer),
        tokenizer=tokenizer,
    )


def bria() -> BriaPipeline:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = BriaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=[4, 6, 6],
    )
    return BriaPipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(),
        vae=vae(),
        text_encoder=t5_encoder(tokenizer),
        tokenizer=tokenizer,
    )


class NoGuardrail(ModelMixin, ConfigMixin):
    """Cosmos does not run without a safety checker, and its own is another package."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(1))

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: object) -> object:
        return video


def cosmos2_text_to_image() -> Cosmos2TextToImagePipeline:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )
    return Cosmos2TextToImagePipeline(
        transformer=lively(transformer),
        scheduler=flow_euler(use_karras_sigmas=True),
        vae=wan_vae(),
        text_encoder=t5_encoder(tokenizer),
        tokenizer=tokenizer,
        safety_checker=NoGuardrail(),
    )


def qwen_image21() -> QwenImage21Pipeline:
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        mlp_ratio=2,
        axes_dims_rope=(4, 6, 6),
    )
    autoencoder = AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.5, 2.0, 1.0, 1.2],
    )
    return QwenImage21Pipeline(
        transformer=lively(transformer),
        scheduler=dynamic_flow_euler(0.9, max_image_seq_len=8192, shift_terminal=0.02),
        vae=autoencoder.eval(),
        text_encoder=qwen3_vl(tokenizer),
        processor=qwen3_vl_processor(tokenizer),
    )


def hunyuan_dit() -> HunyuanDiTPipeline:
    """Four blocks, so that the last one has a skip connection."""
    torch.manual_seed(0)
    tokenizer, t5 = bert_tokenizer(), t5_tokenizer()
    transformer = HunyuanDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        hidden_size=16,
        mlp_ratio=2.0,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        use_style_cond_and_image_meta_size=False,
    )
    return HunyuanDiTPipeline(
        transformer=lively(transformer),
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.018,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        vae=vae(
            block_out_channels=(4,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=2,
            shift_factor=None,
        ),
        text_encoder=bert(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


SMALL = {"height": 16, "width": 16}
SHORT = {**SMALL, "max_sequence_length": LETTERS}
NEGATIVE = {"negative_prompt": "a blurred ball"}

TEXT_TO_IMAGE: dict[str, Family] = {
    "flux": Family(label="Flux.1", build=flux, call={**SHORT, "guidance_scale": 3.5}, guided=None),
    "flux-true-cfg": Family(
        label="Flux.1, classifier-free guidance",
        build=flux,
        call=SHORT,
        guided={**NEGATIVE, "true_cfg_scale": 4.0},
    ),
    "sd3": Family(
        label="Stable Diffusion 3",
        build=sd3,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 4.5},
    ),
    "sd3-skip-layers": Family(
        label="Stable Diffusion 3, skip-layer guidance",
        build=sd3,
        call={**SHORT, "guidance_scale": 1.0},
        guided={
            "guidance_scale": 4.5,
            "skip_guidance_layers": [1],
            "skip_layer_guidance_start": 0.2,
            "skip_layer_guidance_stop": 0.7,
        },
    ),
    "qwen-image": Family(
        label="Qwen-Image",
        build=qwen_image,
        call={**SMALL, "true_cfg_scale": 1.0},
        guided={**NEGATIVE, "true_cfg_scale": 4.0},
    ),
    "z-image": Family(
        label="Z-Image",
        build=z_image,
        call={**SMALL, "max_sequence_length": LETTERS, "guidance_scale": 0.0},
        guided={**NEGATIVE, "guidance_scale": 4.0},
    ),
    "flux2": Family(
        label="Flux.2",
        build=flux2,
        call={**SMALL, "max_sequence_length": 128, "text_encoder_out_layers": (1, 2, 3)},
    ),
    "flux2-klein": Family(
        label="Flux.2 Klein",
        build=flux2_klein,
        call={
            **SMALL,
            "max_sequence_length": 64,
            "text_encoder_out_layers": (1, 2, 3),
            "guidance_scale": 1.0,
        },
        guided={"guidance_scale": 4.0},
    ),
    "lumina2": Family(
        label="Lumina 2",
        build=lumina2,
        call={"height": 64, "width": 64, "max_sequence_length": 96, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 4.0},
    ),
    "lumina2-truncated": Family(
        label="Lumina 2, guidance in half of the steps",
        build=lumina2,
        call={"height": 64, "width": 64, "max_sequence_length": 96, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 4.0, "cfg_trunc_ratio": 0.5},
    ),
    "sana": Family(
        label="SANA",
        build=sana,
        call={
            "height": 32,
            "width": 32,
            "max_sequence_length": LETTERS,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
            "guidance_scale": 1.0,
        },
        guided={**NEGATIVE, "guidance_scale": 4.5},
    ),
    "cogview4": Family(
        label="CogView4",
        build=cogview4,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "aura-flow": Family(
        label="AuraFlow",
        build=aura_flow,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 3.5},
    ),
    "chroma": Family(
        label="Chroma",
        build=chroma,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "hunyuan-image": Family(
        label="HunyuanImage 2.1",
        build=hunyuan_image,
        call={**SMALL, **NEGATIVE},
    ),
    "hunyuan-image-distilled": Family(
        label="HunyuanImage 2.1, distilled",
        build=partial(hunyuan_image, distilled=True),
        call=SMALL,
    ),
    "hidream": Family(
        label="HiDream-I1",
        build=hidream,
        call={"max_sequence_length": LETTERS, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "kandinsky5": Family(
        label="Kandinsky 5, image",
        build=kandinsky5,
        call={"height": 64, "width": 64, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 3.5},
    ),
    "bria-fibo": Family(
        label="Bria Fibo",
        build=bria_fibo,
        call={"height": 64, "width": 64, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "ovis-image": Family(
        label="Ovis-Image",
        build=ovis_image,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "krea2": Family(
        label="Krea 2",
        build=krea2,
        call={**SMALL, "max_sequence_length": LETTERS, "guidance_scale": 0.0},
        guided={**NEGATIVE, "guidance_scale": 4.5},
    ),
    "lumina": Family(
        label="Lumina-Next",
        build=lumina,
        call={
            "height": 64,
            "width": 64,
            "max_sequence_length": LETTERS,
            "clean_caption": False,
            "guidance_scale": 1.0,
        },
        guided={**NEGATIVE, "guidance_scale": 4.0},
    ),
    "prx": Family(
        label="PRX",
        build=prx,
        call={
            **SMALL,
            "use_resolution_binning": False,
            "tokenizer_max_length": LETTERS,
            "guidance_scale": 1.0,
        },
        # With guidance the pipeline makes one picture a call: its timestep has two rows.
        guided=None,
    ),
    "longcat-image": Family(
        label="LongCat-Image",
        build=longcat_image,
        call={**SMALL, "enable_prompt_rewrite": False, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 4.5},
    ),
    "ernie-image": Family(
        label="ERNIE-Image",
        build=ernie_image,
        call={**SMALL, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 4.0},
    ),
    "nucleus-image": Family(
        label="Nucleus-Image",
        build=nucleus,
        call={**SMALL, "return_index": -2, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 4.0},
    ),
    "cogview3-plus": Family(
        label="CogView3-Plus",
        build=cogview3_plus,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "bria": Family(
        label="Bria 3.2",
        build=bria,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
    "cosmos2-text-to-image": Family(
        label="Cosmos-Predict2, image",
        build=cosmos2_text_to_image,
        call={**SHORT, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 7.0},
    ),
    "qwen-image-2.1": Family(
        label="Qwen-Image 2.1, without its cache",
        build=qwen_image21,
        call={"height": 64, "width": 64, "use_kv_cache": False, "true_cfg_scale": 1.0},
        guided={**NEGATIVE, "true_cfg_scale": 4.0},
    ),
    "hunyuan-dit": Family(
        label="HunyuanDiT, DDIM",
        build=hunyuan_dit,
        call={"height": 64, "width": 64, "use_resolution_binning": False, "guidance_scale": 1.0},
        guided={**NEGATIVE, "guidance_scale": 5.0},
    ),
}
